"""Adapters on the real engine of one rank: what moves and what does not, dropout, precision, each choice of target."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file

from beamline.algorithms.losses import PolicyLoss
from beamline.models import tiny
from beamline.protocol.adapter import adapters_of
from beamline.protocol.lora_config import LoraSection
from beamline.trainer.megatron.build import build_model
from beamline.trainer.megatron.distributed import Layout
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.policy import MegatronPolicy
from beamline.trainer.megatron.policy_files import PolicyFiles
from beamline.trainer.megatron.states.adam_states import MakeStates
from beamline.trainer.megatron.states.device import DeviceStates
from beamline.trainer.megatron.states.disk import DiskStates
from beamline.trainer.megatron.states.host import HostStates
from beamline.trainer.progress import num_passes
from beamline.trainer.train_step import StepConfig, train_step
from made_adapters import made, merged
from trainer_batches import batch

pytest_plugins = ("trainer_engine",)
pytestmark = pytest.mark.usefixtures("one_rank")

SPEC = tiny.TINY_BEAM
SHAPES = dict(SPEC.shapes())
LORA = LoraSection(rank=8, alpha=16, normalize_moe_lora=True)
CONFIG = StepConfig(PolicyLoss(), 10_000, 1e-2)
STATE_BYTES = 12


def build(
    model_dir: Path,
    lora: LoraSection = LORA,
    dtype: str = "float32",
    seed: int = 0,
    make_states: MakeStates = DeviceStates,
) -> MegatronPolicy:
    model = build_model(model_dir, Layout(), dtype, lora=lora, seed=seed)
    return MegatronPolicy(model, AdamWSettings(weight_decay=0.1), 1.0, with_reference=True, make_states=make_states)


def frozen(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    """Weights, and the routers' biases; Megatron's count of tokens that go with those is no part of the model."""
    held = dict((*policy._model.module.named_parameters(), *policy._model.module.named_buffers()))
    names = [name for name in held if ".adapter." not in name and not name.endswith("local_tokens_per_expert")]
    return {name: held[name].detach().clone() for name in names}


def adapters(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_move_adapters_alone(model_dir: Path, dtype: str):
    """The base has neither gradients nor optimizer state, and each adapter moves, in whichever precision."""
    policy = build(model_dir, dtype=dtype)
    base, begun = frozen(policy), adapters(policy)
    kept = {name: p for name, p in policy._model.module.named_parameters() if p.requires_grad}
    num_elements = sum(p.numel() for p in kept.values())
    assert kept.keys() == policy._optimizer.own.keys() and all(".adapter." in name for name in kept)
    policy.forward_backward(batch(1, SPEC.vocab_size, 1).mini_batches[0].micro_batches(60), None, PolicyLoss())
    assert policy.gradient_bytes() == 4 * num_elements
    assert all(p.grad is None for p in policy._model.module.parameters() if not p.requires_grad)
    policy.optimizer_step(1e-2)
    for number in (2, 3):
        train_step(policy, batch(number, SPEC.vocab_size), CONFIG)
    assert policy.gradient_bytes() == 0
    assert policy._optimizer.states.num_bytes == STATE_BYTES * num_elements
    assert [name for name, value in frozen(policy).items() if not torch.equal(value, base[name])] == []
    moved = adapters(policy)
    assert moved.keys() == begun.keys() and {str(a.dtype) for a in moved.values()} == {f"torch.{dtype}"}
    assert all(not torch.equal(moved[name], begun[name]) for name in begun)


def test_the_reference_is_the_base(model_dir: Path):
    """Bit for bit, without a copy; and nothing of it is left behind."""
    policy = build(model_dir)
    micro_batches = batch(1, SPEC.vocab_size, 1).mini_batches[0].micro_batches(10_000)
    base = MegatronPolicy(build_model(model_dir, Layout()), AdamWSettings(), 1.0).logprobs(micro_batches)[0]
    assert torch.equal(policy.logprobs(micro_batches)[0], base)
    train_step(policy, batch(2, SPEC.vocab_size), CONFIG)
    own = policy.logprobs(micro_batches)[0]
    assert (own - base).abs().max() > 1e-2
    assert torch.equal(policy.reference_logprobs(micro_batches)[0], base)
    assert torch.equal(policy.logprobs(micro_batches)[0], own)


def test_state_in_any_place_gives_the_same_adapters(model_dir: Path, tmp_path: Path):
    found: list[dict[str, torch.Tensor]] = []
    for make in (DeviceStates, HostStates, partial(DiskStates, directory=tmp_path / "state")):
        policy = build(model_dir, make_states=make)
        for number in (1, 2):
            train_step(policy, batch(number, SPEC.vocab_size), CONFIG)
        found.append(adapters(policy))
        policy.close()
    device, *others = found
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in device.items())


def test_dropout_is_of_training_alone(model_dir: Path):
    """What a policy says is read without it, old_logprobs included, which then take a pass of their own."""
    noisy, plain = (build(model_dir, replace_dropout(rate)) for rate in (0.5, 0.0))
    for policy in (noisy, plain):
        load_made(policy, LORA)
    step = batch(1, SPEC.vocab_size)
    micro_batches = step.mini_batches[0].micro_batches(10_000)
    said = plain.logprobs(micro_batches)[0]
    assert torch.equal(noisy.logprobs(micro_batches)[0], said)
    trained = noisy.forward_backward(micro_batches, None, PolicyLoss()).logprobs[0]
    again = noisy.forward_backward(micro_batches, None, PolicyLoss()).logprobs[0]
    noisy._optimizer.clear()
    assert (trained - said).abs().mean() > 0.01 and (trained - again).abs().mean() > 0.01
    assert torch.equal(noisy.logprobs(micro_batches)[0], said)
    config = replace(CONFIG, has_dropout=True)
    before = noisy.num_passes
    found, wanted = train_step(noisy, step, config).metrics(), train_step(plain, step, CONFIG).metrics()
    assert noisy.num_passes - before == num_passes(step, config) == num_passes(step, CONFIG) + 1
    assert found["policy/mismatch_abs_mean"] == pytest.approx(wanted["policy/mismatch_abs_mean"], rel=1e-5)


def replace_dropout(rate: float) -> LoraSection:
    return LoraSection(rank=LORA.rank, alpha=LORA.alpha, normalize_moe_lora=True, dropout=rate)


def load_made(policy: MegatronPolicy, lora: LoraSection) -> None:
    values = made(adapters_of(SHAPES, lora, SPEC.num_experts_per_tok))
    directory = policy._model.path.parent / "made"
    directory.mkdir(exist_ok=True)
    save_file(values, directory / "adapters.safetensors")
    held = [slot for slots in policy._trained.slots().values() for slot in slots]
    files = PolicyFiles(directory)
    files.check(held)
    files.load(held)


@pytest.mark.parametrize(
    "targets",
    [["linear_q", "linear_v"], ["linear_k", "linear_fc1_up"], ["linear_fc1_gate", "linear_gate"], ["linear_proj"]],
    ids="+".join,
)
def test_some_layers_alone_are_the_merged_model(model_dir: Path, tmp_path: Path, targets: list[str]):
    lora = LoraSection(rank=4, alpha=8, targets=targets)
    policy, found = build(model_dir, lora), adapters_of(SHAPES, lora, SPEC.num_experts_per_tok)
    load_made(policy, lora)
    tensors = made(found)
    assert all((adapters(policy)[name].numpy() == values).all() for name, values in tensors.items())
    tiny.build(SPEC, tmp_path, seed=3, randomise=True)
    save_file(merged(load_file(tmp_path / "model.safetensors"), found, tensors), tmp_path / "model.safetensors")
    whole = MegatronPolicy(build_model(tmp_path, Layout()), AdamWSettings(), 1.0)
    tokens = list(range(20, 60))
    assert policy.score(tokens) == pytest.approx(whole.score(tokens), abs=1e-4)
    assert policy.score(tokens) != pytest.approx(build(model_dir, lora).score(tokens), abs=1e-2)


def test_a_seed_makes_the_first_adapters(model_dir: Path):
    one, same, other = (adapters(build(model_dir, seed=seed)) for seed in (1, 1, 2))
    for name, tensor in one.items():
        assert torch.equal(tensor, same[name])
        assert torch.equal(tensor, other[name]) == ("lora_B" in name)
