"""The torch-free tokenizer gives the ids that transformers gives; run in every environment that has transformers."""

import pytest
from transformers import AutoTokenizer

from beamline.models import chained_sums, tiny
from beamline.models.beam_config import register
from beamline.models.chat import ChatTokenizer

register()

CHATS = (
    [{"role": "user", "content": chained_sums.eval_problems(1)[0].prompt}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve 漢字 😀\n\n  12,345 \\frac{1}{2}"}],
    [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "Answer: 2"},
        {"role": "user", "content": "a <|im_end|> inside"},
    ],
)
OPTIONS = ({}, {"reasoning_effort": "xhigh"}, {"add_generation_prompt": False})


@pytest.fixture(scope="module", params=["tiny-beam", "tiny-qwen3-moe"])
def directory(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    tiny.build(tiny.SPECS[request.param], directory, seed=0)
    return directory


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("messages", CHATS)
def test_both_paths_give_the_same_ids(directory, messages, options):
    ours, theirs = ChatTokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    expected = theirs.apply_chat_template(
        messages, tokenize=True, return_dict=False, **{"add_generation_prompt": True, **options}
    )
    ids = ours.encode_chat(messages, **options)
    assert ids == expected
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_special_tokens_have_the_same_ids(directory):
    ours, theirs = ChatTokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    assert ours.eos_token_ids == (theirs.eos_token_id, theirs.pad_token_id)
    assert len(theirs) == ours.vocab_size
