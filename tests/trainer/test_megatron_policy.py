"""The real engine on one rank: what must not depend on packing, temperature, restarts or precision."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from beamline.algorithms.losses import PolicyLoss
from beamline.algorithms.off_policy import (
    GeometricMask,
    OffPolicy,
    OutlierDrop,
    ProductMask,
    SequenceImportance,
    TokenImportance,
    TokenMask,
)
from beamline.models import tiny
from beamline.trainer.batch import MicroBatch
from beamline.trainer.megatron.build import build_model
from beamline.trainer.megatron.distributed import Layout
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.policy import MegatronPolicy
from beamline.trainer.policy import NotFinite
from beamline.trainer.train_step import StepConfig, train_step
from trainer_batches import batch

pytest_plugins = ("trainer_engine",)
pytestmark = pytest.mark.usefixtures("one_rank")

VOCAB = tiny.TINY_BEAM.vocab_size


def build(model_dir: Path, temperature: float = 1.0, dtype: str = "float32") -> MegatronPolicy:
    return MegatronPolicy(build_model(model_dir, Layout(), dtype), AdamWSettings(weight_decay=0.1), temperature)


def weights(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.export()}


def test_any_packing_gives_the_same_logprobs_and_update(model_dir: Path):
    step = batch(1, VOCAB)
    whole, alone = build(model_dir), build(model_dir)
    packed = whole.logprobs(step.mini_batches[0].micro_batches(10_000))
    single = whole.logprobs([MicroBatch.pack([t]) for t in step.mini_batches[0].trajectories])
    torch.testing.assert_close(torch.cat(packed), torch.cat(single), rtol=0, atol=2e-5)
    one = train_step(whole, step, StepConfig(PolicyLoss(), 10_000, 1e-3)).metrics()
    many = train_step(alone, step, StepConfig(PolicyLoss(), 50, 1e-3)).metrics()
    assert many["policy/num_micro_batches"] > one["policy/num_micro_batches"] == 2
    for name in ("policy/loss", "policy/entropy", "policy/grad_norm", "policy/mismatch_abs_mean"):
        assert many[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6)


def test_temperature_divides_the_capped_logits(model_dir: Path):
    micro_batch = batch(1, VOCAB, 1).mini_batches[0].micro_batches(10_000)[0]
    policy = build(model_dir, temperature=0.7)
    module, config = policy._model.module, policy._model.config
    with torch.no_grad():
        tokens_1T, packed = policy._padded(micro_batch)
        hidden = module(input_ids=tokens_1T, position_ids=None, attention_mask=None, packed_seq_params=packed)
        logits = (hidden[:, 0] @ module.output_layer.weight.t()).double() / config.final_logit_softcapping
        scores = torch.tanh(logits) * config.final_logit_softcapping / 0.7
    rows = torch.from_numpy(micro_batch.rows_L)
    expected = scores.log_softmax(-1)[rows, torch.from_numpy(micro_batch.targets_L)]
    torch.testing.assert_close(policy.logprobs([micro_batch])[0].double(), expected, rtol=0, atol=2e-5)
    tokens = micro_batch.tokens_T[:20].tolist()
    at_one = build(model_dir, temperature=1.0).logprobs([MicroBatch.of_tokens(tokens)])[0]
    assert policy.score(tokens) == pytest.approx(at_one.tolist(), abs=1e-6)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(model_dir: Path, tmp_path: Path):
    config = StepConfig(PolicyLoss(), 200, 3e-3)
    policy = build(model_dir)
    train_step(policy, batch(1, VOCAB), config)
    policy.save(tmp_path)
    resumed = build(model_dir)
    resumed.load(tmp_path)
    assert all(torch.equal(tensor, weights(policy)[name]) for name, tensor in weights(resumed).items())
    for one in (policy, resumed):
        train_step(one, batch(2, VOCAB), config)
    after = weights(policy)
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights(resumed).items())
    start = load_file(model_dir / "model.safetensors")
    moved = [name for name in after if not torch.equal(after[name], start[name])]
    assert len(moved) > 0.9 * len(after) - 16  # experts that no token chose, and the correction biases, stay


def test_updates_follow_adamw(model_dir: Path):
    """Against torch's own, unfused, on copies that are clipped by hand."""
    policy, step = build(model_dir), batch(1, VOCAB, 1)
    policy.forward_backward(step.mini_batches[0].micro_batches(10_000), None, PolicyLoss())
    named = dict(policy._model.module.named_parameters())
    copies = {name: p.detach().clone().requires_grad_() for name, p in named.items()}
    for name, copy in copies.items():
        copy.grad = named[name].grad.clone() if named[name].grad is not None else None
    norm = torch.nn.utils.clip_grad_norm_(copies.values(), 1.0)
    groups = [
        {"params": [p for p in copies.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in copies.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False).step()
    assert policy.optimizer_step(1e-2) == pytest.approx(norm.item(), rel=1e-5)
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.detach(), copies[name].detach(), rtol=1e-5, atol=1e-6)
        assert parameter.grad is None


def test_nan_in_a_gradient_leaves_weights_and_optimizer_as_they_were(model_dir: Path):
    policy, step = build(model_dir), batch(1, VOCAB, 1)
    before = weights(policy)
    mini_batch = step.mini_batches[0]
    policy.forward_backward(mini_batch.micro_batches(10_000), None, PolicyLoss())
    next(policy._model.module.parameters()).grad.view(-1)[0] = float("nan")
    with pytest.raises(NotFinite, match="gradient norm is nan"):
        policy.optimizer_step(1e-2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(policy).items())
    states = policy._optimizer.states
    assert states.num_steps == 0
    assert not any(states.read(name).exp_avg.any() for name, _ in policy._model.module.named_parameters())


def test_bfloat16_trains_on_float32_main_weights_and_keeps_the_router_float32(model_dir: Path):
    policy = build(model_dir, dtype="bfloat16")
    exported = weights(policy)
    kinds = {name: tensor.dtype for name, tensor in exported.items()}
    assert {kind for name, kind in kinds.items() if ".mlp.gate." in name} == {torch.float32}
    assert {kind for name, kind in kinds.items() if ".mlp.gate." not in name} == {torch.bfloat16}
    stored = load_file(model_dir / "model.safetensors")
    gate = "model.layers.1.mlp.gate.weight"
    assert torch.equal(exported[gate], stored[gate])
    full = build(model_dir).logprobs(batch(1, VOCAB, 1).mini_batches[0].micro_batches(10_000))[0]
    half = policy.logprobs(batch(1, VOCAB, 1).mini_batches[0].micro_batches(10_000))[0]
    assert (full - half).abs().mean() < 0.2
    for step in range(1, 4):
        # Far below bfloat16's resolution: only float32 main weights can add such updates up.
        train_step(policy, batch(step, VOCAB), StepConfig(PolicyLoss(), 10_000, 1e-6))
    main = policy._optimizer.states.read("embedding.word_embeddings.weight").main
    assert 0 < (main - stored["model.embed_tokens.weight"].bfloat16().float()).abs().max() < 1e-4


def test_every_loss_token_has_the_entropy_of_its_distribution(model_dir: Path):
    policy, step = build(model_dir), batch(1, VOCAB, 1)
    found = policy.forward_backward(step.mini_batches[0].micro_batches(10_000), None, PolicyLoss())
    mean = found.sums.entropy / sum(len(logprobs_L) for logprobs_L in found.logprobs)
    assert 0 < mean < np.log(VOCAB)


CORRECTIONS = {
    "outlier": OffPolicy(outlier=OutlierDrop(1e-4, 100.0)),
    "token mask": OffPolicy(token_mask=TokenMask(0.5, 2.0)),
    "token importance": OffPolicy(importance=TokenImportance(2.0)),
    "sequence importance": OffPolicy(importance=SequenceImportance(5.0)),
    "geometric": OffPolicy(sequence_mask=GeometricMask(0.99, 1.01)),
    "product": OffPolicy(sequence_mask=ProductMask(0.5, 2.0)),
}


def planted(num_tokens: list[int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A mismatch for sequences of so many loss tokens, and the weights that each correction must give.

    The first token's ratio is 200 in sequence 0 and 3 in sequence 1; each of sequence 2 has exp(-0.5) = 0.607; all
    others are 1. So the token mask [0.5, 2] takes two tokens, and both sequence masks take three sequences.
    """
    ratios = [np.ones(num) for num in num_tokens]
    ratios[0][0], ratios[1][0], ratios[2][:] = 200, 3, np.exp(-0.5)
    weights = {name: [np.ones(num) for num in num_tokens] for name in CORRECTIONS}
    weights["outlier"][0][:] = 0
    weights["token mask"][0][0] = weights["token mask"][1][0] = 0
    weights["token importance"][0][0] = weights["token importance"][1][0] = 2
    weights["token importance"][2][:] = np.exp(-0.5)
    weights["sequence importance"][0][:] = 5
    weights["sequence importance"][1][:] = 3
    weights["sequence importance"][2][:] = np.exp(-0.5 * num_tokens[2])
    for sequence in range(3):
        weights["geometric"][sequence][:] = weights["product"][sequence][:] = 0
    return np.log(np.concatenate(ratios)), {name: np.concatenate(parts) for name, parts in weights.items()}


def test_corrections_weight_the_gradient_and_masked_tokens_have_none(model_dir: Path):
    """Gradients with a correction are those of a plain loss whose advantages are multiplied by the known weights."""
    policy, step = build(model_dir), batch(1, VOCAB, 1)
    (plain,) = step.mini_batches[0].micro_batches(10_000)
    own_L = policy.logprobs([plain])[0].numpy()
    mismatch_L, weights = planted(np.bincount(plain.sequences_L).tolist())
    apart = replace(plain, rollout_logprobs_L=(own_L - mismatch_L).astype(np.float32))

    def gradient(micro_batch: MicroBatch, off_policy: OffPolicy) -> tuple[torch.Tensor, float]:
        found = policy.forward_backward([micro_batch], None, PolicyLoss(off_policy=off_policy))
        parts = [p.grad.flatten().clone() for p in policy._model.module.parameters() if p.grad is not None]
        policy._optimizer.clear()
        return torch.cat(parts), found.sums.loss

    for name, off_policy in CORRECTIONS.items():
        weighted = replace(plain, advantages_L=(plain.advantages_L * weights[name]).astype(np.float32))
        expected, loss = gradient(weighted, OffPolicy())
        found, found_loss = gradient(apart, off_policy)
        assert found_loss == pytest.approx(loss, rel=1e-5, abs=1e-6), name
        assert (found - expected).norm() <= 1e-5 * expected.norm(), name


def test_a_step_with_every_correction_tells_what_they_did(model_dir: Path):
    policy, step = build(model_dir), batch(1, VOCAB)
    off_policy = OffPolicy(OutlierDrop(1e-8, 1e8), TokenMask(0.01, 2.0), TokenImportance(), GeometricMask(1e-3, 10.0))
    stats = train_step(policy, step, StepConfig(PolicyLoss(off_policy=off_policy), 50, 1e-3)).metrics()
    for name in ("outlier", "token_mask", "importance", "sequence_mask"):
        assert 0 <= stats[f"off_policy/{name}/masked"] <= 1
        assert stats[f"off_policy/{name}/ratio_min"] <= stats[f"off_policy/{name}/ratio_max"]
    assert 0 < stats["off_policy/token_mask/masked"] < 1
    assert stats["policy/grad_norm"] > 0
