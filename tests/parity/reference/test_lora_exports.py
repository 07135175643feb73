"""Exported adapters in other people's hands: the PEFT library's and transformers', on their own models."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from beamline.models import tiny
from beamline.protocol.adapter import adapters_of
from exports import make_lora_exports
from lora_variants import ALL
from made_adapters import made

REFERENCES = Path(__file__).parents[1] / "references"
MODELS = ("tiny-beam", "tiny-qwen3-moe")
PLANTED = "norm-alpha2"
TOLERANCE = 1e-4
"""In float32: adapters of this size move log-probabilities by whole units, and what sums in another order change."""
EXACT_TOLERANCE = 1e-5
"""In float64."""
WEIGHT_TOLERANCE = 2e-6
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""As the references were computed."""

pytestmark = pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning",  # it compares with modules alone
)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_lora_exports(tmp_path_factory.mktemp("exports"))


def with_peft(folder: Path, dtype: torch.dtype = torch.float32) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype, **EAGER)
    return PeftModel.from_pretrained(base, folder / "adapter", autocast_adapter_dtype=False).eval()


def with_merged(folder: Path, dtype: torch.dtype | str = "auto") -> nn.Module:
    merged = folder / "merged"
    model, report = AutoModelForCausalLM.from_pretrained(merged, dtype=dtype, output_loading_info=True, **EAGER)
    assert not any(report.values()), report
    return model


def logprobs(model: nn.Module, name: str) -> torch.Tensor:
    """Of the reference's tokens, [S, T - 1]."""
    tokens = load_file(REFERENCES / f"{name}-lora.safetensors")["tokens"]
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[:, :-1]
    scores = logits if logits.dtype == torch.float64 else logits.float()
    return scores.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def gaps(model: nn.Module, name: str, variant: str) -> torch.Tensor:
    """Between the model's log-probabilities and the reference's, [S, T - 1]."""
    expected = load_file(REFERENCES / f"{name}-lora.safetensors")[f"{variant}.logprobs"]
    return (logprobs(model, name) - expected).abs()


@pytest.mark.parametrize("variant", ALL)
@pytest.mark.parametrize("name", MODELS)
def test_peft_finds_every_adapter(exports: Path, name: str, variant: str):
    """In the directory that engines read too: PEFT puts experts, one by one there, into transformers' fused ones."""
    assert gaps(with_peft(exports / name / variant), name, variant).max() <= TOLERANCE


@pytest.mark.parametrize("variant", ALL)
@pytest.mark.parametrize("name", MODELS)
def test_the_merged_model_gives_the_references_logprobs(exports: Path, name: str, variant: str):
    """In float64, as the references were computed: what is left is how weights were rounded."""
    model = with_merged(exports / name / variant, torch.float64)
    assert gaps(model, name, variant).max() <= EXACT_TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_pefts_own_merge_is_ours_weight_for_weight(exports: Path, name: str):
    folder = exports / name / PLANTED
    theirs, ours = with_peft(folder).merge_and_unload().state_dict(), with_merged(folder).state_dict()
    before = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).state_dict()
    assert theirs.keys() == ours.keys() == before.keys()
    for weight, values in ours.items():
        assert torch.allclose(theirs[weight], values, rtol=0, atol=WEIGHT_TOLERANCE), weight
    fused = [weight for weight in ours if weight.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert all((ours[weight] != before[weight]).any(-1).any(-1).all() for weight in fused), "every expert of them"
    assert not torch.equal(
        ours["model.layers.0.self_attn.q_proj.weight"], before["model.layers.0.self_attn.q_proj.weight"]
    )


@pytest.mark.parametrize("planted", ["scale", "permuted"])
@pytest.mark.parametrize("name", MODELS)
def test_a_mistake_in_the_files_shows(exports: Path, name: str, planted: str):
    """Experts' adapters too small by the number of experts a token, or given to their neighbours."""
    for model in (with_peft(exports / name / planted), with_merged(exports / name / planted)):
        assert gaps(model, name, PLANTED).max() > 1000 * TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_a_bfloat16_model_is_rounded_as_torch_rounds(exports: Path, name: str):
    """To the bit; what the model has in float32 stays so."""
    folder, spec = exports / name / "bfloat16", tiny.SPECS[name]
    adapters = adapters_of(dict(spec.shapes()), ALL[PLANTED], spec.num_experts_per_tok)
    tensors = {tensor: torch.from_numpy(values).double() for tensor, values in made(adapters).items()}
    expected = load_file(folder / "base" / "model.safetensors")
    for adapter in adapters:
        weight = expected[f"{adapter.module}.weight"]
        total = weight.double() + adapter.scale * tensors[adapter.b] @ tensors[adapter.a]
        expected[f"{adapter.module}.weight"] = total.to(weight.dtype)
    found = load_file(folder / "merged" / "model.safetensors")
    assert found.keys() == expected.keys()
    for weight, values in expected.items():
        assert found[weight].dtype == values.dtype and torch.equal(found[weight], values), weight
    assert gaps(with_merged(folder), name, PLANTED).median() < 0.5
