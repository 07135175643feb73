"""Routing replay on one rank: the engine's experts with the trainer's gate weights, and nothing else changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from beamline.algorithms.losses import PolicyLoss
from beamline.models import tiny
from beamline.models.routing import RoutingShape
from beamline.trainer.batch import MicroBatch, MiniBatch, Trajectory
from beamline.trainer.megatron import replay
from beamline.trainer.megatron.build import build_model
from beamline.trainer.megatron.distributed import Layout
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.policy import MegatronPolicy
from beamline.trainer.train_step import StepConfig, train_step
from trainer_batches import batch

pytest_plugins = ("trainer_engine",)
pytestmark = pytest.mark.usefixtures("one_rank")

MODELS = ("tiny-beam", "tiny-qwen3-moe")


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    tiny.build(tiny.SPECS[request.param], directory, seed=3, randomise=True)
    return directory


def build(model_dir: Path, dtype: str = "float32", recompute: bool = False) -> MegatronPolicy:
    return MegatronPolicy(build_model(model_dir, Layout(), dtype, recompute), AdamWSettings(), temperature=1.0)


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[torch.Tensor]]]:
    """The ids that each layer's router takes, micro-batch by micro-batch."""
    found: dict[int, list[torch.Tensor]] = {}
    choose = replay.LayerReplay.get_replay_topk

    def record(self: replay.LayerReplay, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = choose(self, *args)
        found.setdefault(self.layer, []).append(ids)
        return values, ids

    with monkeypatch.context() as patch:
        patch.setattr(replay.LayerReplay, "get_replay_topk", record)
        yield found


def live_routes(policy: MegatronPolicy, mini_batch: MiniBatch, monkeypatch: pytest.MonkeyPatch) -> list[Trajectory]:
    """The trajectories with the routes that the policy itself chooses, in the order in which it ranks them."""
    shape = RoutingShape.of(policy._model.path)
    routed = []
    for t in mini_batch.trajectories:
        micro_batch = MicroBatch.pack([t])
        with recorded(monkeypatch) as found:
            policy.forward_backward([micro_batch], None, PolicyLoss())
        policy._optimizer.clear()
        routes = np.zeros((len(t.tokens) - 1, shape.num_layers, shape.top_k), np.uint8)
        for layer, (ids,) in found.items():
            routes[:, layer] = ids[:-1].numpy()
        assert sorted(found) == list(shape.sparse_layers)
        routed.append(replace(t, routes=routes))
    policy.take_route_counts()
    return routed


def gradients(policy: MegatronPolicy, micro_batches: list[MicroBatch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs = policy.forward_backward(micro_batches, None, PolicyLoss()).logprobs
    named = {name: p.grad.clone() for name, p in policy._model.module.named_parameters() if p.grad is not None}
    policy._optimizer.clear()
    return torch.cat(logprobs), named


def shifted(trajectory: Trajectory, num_experts: int) -> Trajectory:
    assert trajectory.routes is not None
    return replace(trajectory, routes=(trajectory.routes + 1) % num_experts)


def pack_apart(trajectories: list[Trajectory]) -> list[MicroBatch]:
    """Three micro-batches of different lengths."""
    return [MicroBatch.pack(trajectories[:1]), MicroBatch.pack(trajectories[1:4]), MicroBatch.pack(trajectories[4:])]


@pytest.mark.parametrize("recompute", [False, True])
def test_replay_of_the_live_routes_is_bit_equal(model_dir: Path, recompute: bool, monkeypatch: pytest.MonkeyPatch):
    live = build(model_dir)
    mini_batch = batch(1, 512, 1).mini_batches[0]
    routed = live_routes(live, mini_batch, monkeypatch)
    expected, expected_gradients = gradients(live, pack_apart(list(mini_batch.trajectories)))
    live.take_route_counts()
    policy = build(model_dir, recompute=recompute)
    found, found_gradients = gradients(policy, pack_apart(routed))
    assert torch.equal(found, expected)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert torch.equal(found_gradients[name], gradient), name
    assert torch.equal(torch.cat(policy.logprobs(pack_apart(routed))), expected)
    counts = policy.take_route_counts()
    num_layers = len(RoutingShape.of(model_dir).sparse_layers)
    assert counts.pairs_L.sum() == 2 * num_layers * sum(len(t.tokens) - 1 for t in routed)
    assert counts.metrics()["routing/fallback_share"] == 0
    assert counts.metrics()["routing/agreement"] == 1


def test_routes_shifted_by_one_expert_change_the_logprobs_and_reach_the_router(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    policy, shape = build(model_dir), RoutingShape.of(model_dir)
    routed = live_routes(policy, batch(1, 512, 1).mini_batches[0], monkeypatch)
    own, _ = gradients(policy, [MicroBatch.pack(routed)])
    policy.take_route_counts()
    other, found = gradients(policy, [MicroBatch.pack([shifted(t, shape.num_experts) for t in routed])])
    assert (own - other).abs().mean() > 0.05
    routers = {name: gradient for name, gradient in found.items() if name.endswith("router.weight")}
    assert len(routers) == len(shape.sparse_layers)
    assert all(gradient.abs().max() > 1e-4 for gradient in routers.values())
    metrics = policy.take_route_counts().metrics()
    assert metrics["routing/agreement"] < 0.1
    assert {f"routing/agreement_layer_{layer}" for layer in shape.sparse_layers} <= metrics.keys()


def test_trajectories_without_routes_are_routed_live_and_counted(model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    policy = build(model_dir)
    mini_batch = batch(1, 512, 1).mini_batches[0]
    routed = live_routes(policy, mini_batch, monkeypatch)
    shape = RoutingShape.of(model_dir)
    mixed = [routed[0], shifted(routed[1], shape.num_experts), replace(routed[2], routes=None)]
    expected = [policy.logprobs([MicroBatch.pack([t])])[0] for t in mixed]
    policy.take_route_counts()
    torch.testing.assert_close(policy.logprobs([MicroBatch.pack(mixed)])[0], torch.cat(expected), rtol=0, atol=2e-5)
    rows = [len(t.tokens) - 1 for t in mixed]
    assert policy.take_route_counts().metrics()["routing/fallback_share"] == pytest.approx(rows[2] / sum(rows))
    assert policy.score(routed[0].tokens.tolist()) == pytest.approx(
        policy.logprobs([MicroBatch.of_tokens(routed[0].tokens.tolist())])[0].tolist(), abs=1e-6
    )


def test_a_train_step_counts_every_token_once(model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    live, policy = build(model_dir), build(model_dir, recompute=True)
    step = batch(1, 512, 2)
    minis = tuple(MiniBatch(tuple(live_routes(live, mini, monkeypatch))) for mini in step.mini_batches)
    metrics = train_step(policy, replace(step, mini_batches=minis), StepConfig(PolicyLoss(), 90, 1e-3)).metrics()
    assert metrics["policy/num_micro_batches"] > 2
    assert metrics["routing/fallback_share"] == 0
    assert metrics["routing/agreement"] == 1  # all of it under the weights of the step's start
    assert policy.take_route_counts().metrics() == {}


def test_bfloat16_replays_on_a_float32_router(model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    full, half = build(model_dir), build(model_dir, dtype="bfloat16")
    routed = [MicroBatch.pack(live_routes(full, batch(1, 512, 1).mini_batches[0], monkeypatch))]
    live = [replace(routed[0], routes_TLK=None, routed_T=np.zeros_like(routed[0].routed_T))]
    exact = full.logprobs(routed)[0]
    replayed_gap = (half.logprobs(routed)[0] - exact).abs().mean()
    agreement = half.take_route_counts().metrics()["routing/agreement"]
    assert 0.8 < agreement < 1
    assert replayed_gap < (half.logprobs(live)[0] - exact).abs().mean()
