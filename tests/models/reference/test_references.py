"""The stored parity references are what transformers computes today."""

import make_references
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from beamline.models import tiny

NAMES = make_references.MODELS


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def made(name):
    return make_references.make(name)


def test_the_stored_file_is_what_the_script_makes(name, made):
    path = make_references.DIRECTORY / f"{name}.safetensors"
    stored = load_file(path)
    assert stored.keys() == made.keys()
    for tensor, values in stored.items():
        if values.dtype == torch.int64:
            assert torch.equal(values, made[tensor]), tensor
        else:
            torch.testing.assert_close(made[tensor], values, rtol=1e-4, atol=1e-6, msg=lambda m, t=tensor: f"{t}: {m}")
    with safe_open(path, "pt") as file:
        assert file.metadata() == make_references.metadata(name)


def test_the_bfloat16_file_is_what_the_script_makes(name):
    """But for the order in which a CPU's bfloat16 kernels add."""
    stored = load_file(make_references.DIRECTORY / f"{name}-bfloat16.safetensors")
    made = make_references.make_bfloat16(name)
    assert {tensor: (v.dtype, v.shape) for tensor, v in stored.items()} == {
        tensor: (v.dtype, v.shape) for tensor, v in made.items()
    }
    assert torch.equal(stored["tokens"], made["tokens"])
    assert (stored["logits"].float() - made["logits"].float()).abs().mean() < 0.1
    assert (stored["routed_experts"].sort(-1).values == made["routed_experts"].sort(-1).values).float().mean() > 0.95


def test_no_gradient_is_zero(made):
    for tensor, values in made.items():
        if tensor.startswith("grad."):
            assert values.abs().max() > 1e-3, tensor


def test_sequences_reach_past_the_window(made):
    assert made["tokens"].shape[1] > 2 * tiny.TINY_BEAM.sliding_window


def test_routes_are_spread_over_the_experts_of_sparse_layers(name, made):
    num_dense = getattr(tiny.SPECS[name], "num_dense_layers", 0)
    routes = made["routed_experts"]
    for layer in range(routes.shape[2]):
        used = routes[:, :, layer].unique().tolist()
        assert used == [0] if layer < num_dense else len(used) >= 12


def test_no_route_hangs_on_a_rounding_error(name, made):
    assert torch.equal(make_references.make(name, torch.float64)["routed_experts"], made["routed_experts"])
