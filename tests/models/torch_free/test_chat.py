"""Tokenizer and chat template: any text has tokens, prompts are short, and what cannot be read is refused."""

import pytest
from tokenizers import Tokenizer

from beamline.models import chained_sums, tiny, tokenizer
from beamline.models.chat import ChatTokenizer

QUESTION = [{"role": "user", "content": "1+1"}]
TEXTS = (
    "Natalia sold clips to 48 of her friends in April.\n\nHow many clips altogether?",
    r"Find $\sum_{k=1}^{2025} \left\lfloor \frac{k}{7} \right\rfloor$ with $0 \le x < \sqrt{2}$.",
    "naïve café — 漢字 ∑ 😀\t\u200b tail  ",
    "\x00\x7f\ufffd",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny.build(tiny.TINY_BEAM, directory, seed=0)
    return directory


@pytest.fixture(scope="module")
def chat(directory):
    return ChatTokenizer.load(directory)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_the_tokenizer(chat, text):
    assert chat.decode(chat.encode(text)) == text


def test_each_digit_is_a_token(chat):
    assert len(chat.encode("2025")) == 4


def test_every_id_of_the_models_vocabulary_is_a_token(chat):
    assert chat.vocab_size == tokenizer.VOCAB_SIZE == tiny.TINY_BEAM.vocab_size
    assert all(chat.tokenizer.id_to_token(index) is not None for index in range(tokenizer.VOCAB_SIZE))


def test_training_gives_the_tokenizer_that_is_shipped():
    shipped = Tokenizer.from_file(str(tokenizer.ASSETS / "tokenizer.json"))
    trained = tokenizer.train()
    assert trained.get_vocab() == shipped.get_vocab()
    for problem in chained_sums.distinct_problems(9, 20):
        text = f"{problem.prompt}\n{chained_sums.solve(problem)}"
        assert trained.encode(text).ids == shipped.encode(text).ids


def test_a_prompt_opens_the_assistants_turn(chat):
    assert chat.render(QUESTION) == "<|effort_minimal|><|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    assert chat.render(QUESTION, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_minimal_effort_is_the_default_and_costs_one_token(chat):
    prompt = chat.encode_chat(QUESTION)
    assert prompt == chat.encode_chat(QUESTION, reasoning_effort="minimal")
    assert len(prompt) == len(chat.encode(chat.render(QUESTION).removeprefix("<|effort_minimal|>"))) + 1


def test_every_effort_gives_a_prompt_of_its_own(chat):
    prompts = {tuple(chat.encode_chat(QUESTION, reasoning_effort=effort)) for effort in tokenizer.REASONING_EFFORTS}
    assert len(prompts) == len(tokenizer.REASONING_EFFORTS) == 6


def test_an_unknown_effort_is_refused_with_those_there_are(chat):
    with pytest.raises(ValueError, match="reasoning_effort is lots: use one of minimal, low, medium, high, xhigh, max"):
        chat.encode_chat(QUESTION, reasoning_effort="lots")


def test_completions_end_at_the_end_of_turn(chat):
    assert chat.eos_token_ids == (tokenizer.END_OF_TURN_ID, tokenizer.PAD_ID)
    assert chat.encode(tokenizer.END_OF_TURN) == [tokenizer.END_OF_TURN_ID]
    assert chat.decode([*chat.encode("Answer: 3"), tokenizer.END_OF_TURN_ID]) == "Answer: 3"


def test_a_prompt_of_the_task_is_short(chat):
    problem = chained_sums.eval_problems(1)[0]
    assert len(chat.encode_chat([{"role": "user", "content": problem.prompt}])) <= 40


def test_a_directory_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist: give the path of a Hugging Face directory"):
        ChatTokenizer.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("tokenizer.json", "has no tokenizer.json: save the model's tokenizer there"),
        ("chat_template.jinja", "has no chat template: neither chat_template.jinja nor chat_template in"),
    ],
)
def test_a_missing_file_is_named_with_its_directory(tmp_path, missing, message):
    tiny.build(tiny.TINY_BEAM, tmp_path, seed=0)
    (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match=message) as refusal:
        ChatTokenizer.load(tmp_path)
    assert str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("generation_config.json", "{", "generation_config.json is not JSON"),
        ("chat_template.jinja", "{% if %}", "chat template that does not parse"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, file, content, message):
    tiny.build(tiny.TINY_BEAM, tmp_path, seed=0)
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        ChatTokenizer.load(tmp_path)
