"""What the trainer exports is what transformers' own models load, and gives the trainer's log-probabilities."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from exports import KINDS, MODELS, make_exports

TOLERANCE = 1e-5
OWN = {"tiny-beam": transformers.BeamForCausalLM, "tiny-qwen3-moe": transformers.Qwen3MoeForCausalLM}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_exports(tmp_path_factory.mktemp("exports"))


def load(directory: Path) -> tuple[nn.Module, dict[str, object]]:
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)


def gaps(model: nn.Module, directory: Path) -> torch.Tensor:
    """Between the model's log-probabilities and the trainer's, [S, T - 1]."""
    scored = load_file(directory / "scored.safetensors")
    with torch.no_grad():
        logprobs = model(input_ids=scored["tokens"]).logits[:, :-1].log_softmax(-1)
    return (logprobs.gather(-1, scored["tokens"][:, 1:, None])[..., 0] - scored["logprobs"]).abs()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_an_export_gives_the_trainer_s_logprobs(exports: Path, name: str, kind: str):
    """In the float32 that its configuration names, with every weight expected and none missing."""
    model, report = load(exports / name / kind)
    assert type(model) is OWN[name]
    assert not any(report.values()), report
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert gaps(model, exports / name).max() <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_of_the_start_would_not(exports: Path, name: str):
    model, _ = load(exports / name / "start")
    assert gaps(model, exports / name).mean() > 1000 * TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_a_sharded_export_has_every_weight_once(exports: Path, name: str):
    whole, sharded = exports / name / "whole", exports / name / "sharded"
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert files == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    assert len(files) >= 3
    shards = {file: load_file(sharded / file) for file in files}
    assert index == {tensor: file for file, tensors in shards.items() for tensor in tensors}
    assert sum(map(len, shards.values())) == len(index)
    expected = load_file(whole / "model.safetensors")
    assert index.keys() == expected.keys()
    for tensor, values in expected.items():
        assert torch.equal(shards[index[tensor]][tensor], values), tensor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_tokenizer_and_ends_of_text_come_along(exports: Path, name: str, kind: str):
    """The same tokens as at the start, and an end that both generation and tokenizer know."""
    before, after = (AutoTokenizer.from_pretrained(exports / name / where) for where in ("start", kind))
    chat = [{"role": "user", "content": "1 + 2 + 3 = ?"}]
    expected = before.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert after.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == expected
    assert after.decode(expected) == before.decode(expected)
    generation = GenerationConfig.from_pretrained(exports / name / kind)
    ends = generation.eos_token_id
    assert after.eos_token_id in (ends if isinstance(ends, list) else [ends])
    assert generation.pad_token_id is not None


@pytest.mark.parametrize("name", MODELS)
def test_what_was_exported_generates(exports: Path, name: str):
    """Greedily, each token is the one of highest probability."""
    model, _ = load(exports / name / "sharded")
    prompt = load_file(exports / name / "scored.safetensors")["tokens"][:1, :20]
    with torch.no_grad():
        text = model.generate(prompt, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(prompt))
        best = model(input_ids=text[:, :-1]).logits.argmax(-1)
    assert text.shape[1] > prompt.shape[1]
    assert torch.equal(text[:, prompt.shape[1] :], best[:, prompt.shape[1] - 1 :])
