"""The shipped models in bfloat16 against transformers' own, with transformers' routes replayed.

Left to themselves, two correct implementations choose other experts wherever two scores nearly tie.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from beamline.models import assets
from beamline.models.routing import RoutingShape
from beamline.trainer.batch import MicroBatch, Trajectory
from beamline.trainer.megatron.build import build_model
from beamline.trainer.megatron.distributed import Layout
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.policy import MegatronPolicy

pytest_plugins = ("trainer_engine",)
pytestmark = pytest.mark.usefixtures("one_rank")

REFERENCES = Path(__file__).parent / "references"
MEAN_GAP = 0.02


def pack(tokens_T: torch.Tensor, routes_TLK: torch.Tensor | None) -> MicroBatch:
    rest = len(tokens_T) - 1
    sequence = Trajectory(
        tokens=tokens_T.numpy(),
        num_prompt_tokens=1,
        loss_mask=np.ones(rest, bool),
        rollout_logprobs=np.zeros(rest, np.float32),
        advantage=0.0,
        policy_versions=np.zeros(rest, np.int64),
        routes=None if routes_TLK is None else routes_TLK[:rest].to(torch.uint8).numpy(),
    )
    return MicroBatch.pack([sequence])


def logits(policy: MegatronPolicy, micro_batch: MicroBatch) -> torch.Tensor:
    """After the soft cap, [T, V] in float32."""
    tokens_1T, packed = policy._padded(micro_batch)
    module = policy._model.module
    with torch.no_grad():
        hidden = module(input_ids=tokens_1T, position_ids=None, attention_mask=None, packed_seq_params=packed)
        weight = module.output_layer.weight
        room_TV = torch.empty(len(hidden), len(weight))
        return policy._head.bent(hidden[:, 0], weight, room_TV) * policy._head.scale


@pytest.mark.parametrize("name", assets.WARM_STARTED)
def test_with_the_reference_s_routes_logits_differ_by_rounding(name: str, tmp_path: Path):
    reference = load_file(REFERENCES / f"{name}-bfloat16.safetensors")
    model_dir = assets.materialise(name, tmp_path)
    policy = MegatronPolicy(build_model(model_dir, Layout(), "bfloat16"), AdamWSettings(), temperature=1.0)
    routed = [pack(*row) for row in zip(reference["tokens"], reference["routed_experts"], strict=True)]
    live = [pack(row, None) for row in reference["tokens"]]
    positions = reference["logits_positions"][:-1]  # the last token's has no row to replay
    found = torch.stack([logits(policy, micro_batch)[positions] for micro_batch in routed])
    gap = (found - reference["logits"][:, :-1].float()).abs().mean().item()
    policy.take_route_counts()
    replayed, expected = torch.cat(policy.logprobs(routed)), reference["logprobs"].flatten()
    metrics = policy.take_route_counts().metrics()
    own_gap = (torch.cat(policy.logprobs(live)) - expected).abs().mean().item()
    replayed_gap = (replayed - expected).abs().mean().item()
    print(f"{name}: logits {gap:.4f}, logprobs {replayed_gap:.4f} replayed, {own_gap:.4f} live; {metrics}")
    assert gap <= MEAN_GAP
    assert replayed_gap < own_gap
    assert metrics["routing/fallback_share"] == 0
    for layer in RoutingShape.of(model_dir).sparse_layers:
        assert 0.85 < metrics[f"routing/agreement_layer_{layer}"] <= 1
