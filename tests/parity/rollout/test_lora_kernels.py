"""What is computed for rows of different slots, and of none, beside the plainest way to do it, row by row.

Legend: T tokens, E experts, S slots, R rank, C hidden size, M intermediate size, K experts a token.
"""

from types import SimpleNamespace
from typing import Any

import torch

E, S, R, C, M, K = 6, 3, 4, 16, 8, 2
SLOTS_T = [-1, 0, 1, 2, -1, 2, 2, 0, 1, -1]
T = len(SLOTS_T)


def made(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def punica() -> Any:
    """Told of the step's tokens as vLLM tells it: slot + 1, and 0 for none."""
    from beamline.rollout.lora.punica import GroupedPunica  # imports vLLM

    grouped = GroupedPunica(T, T, torch.device("cpu"))
    mapping = SimpleNamespace(index_mapping=tuple(slot + 1 for slot in SLOTS_T))
    grouped.update_metadata(mapping, None, S + 1, 0)
    return grouped


def test_dense_layers_add_each_rows_own_adapter_and_none_to_rows_without() -> None:
    outputs = (8, 4)
    a, b = [made(S, 1, R, C) for _ in outputs], [made(S, 1, size, R) for size in outputs]
    x, y = made(T, C), made(T, sum(outputs))
    expected = y.clone()
    for row, slot in enumerate(SLOTS_T):
        if slot >= 0:
            expected[row] += torch.cat([b_S[slot, 0] @ (a_S[slot, 0] @ x[row]) for a_S, b_S in zip(a, b, strict=True)])
    punica().add_lora_linear(y, x, tuple(a), tuple(b), 1.0, outputs)
    assert torch.allclose(y, expected, atol=1e-12)


def test_experts_add_each_tokens_own_adapter_and_none_to_tokens_without() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from beamline.rollout.lora.experts import LoraExperts
    from beamline.rollout.plain_kernels import silu_and_mul

    context: Any = SimpleNamespace(
        w13_lora_a_stacked=(made(S, E, R, C), made(S, E, R, C)),
        w13_lora_b_stacked=(made(S, E, M, R), made(S, E, M, R)),
        w2_lora_a_stacked=(made(S, E, R, M),),
        w2_lora_b_stacked=(made(S, E, C, R),),
        max_loras=S,
        punica_wrapper=punica(),
    )
    experts: Any = LoraExperts.__new__(LoraExperts)
    experts.set_lora_context(context)
    w1, w2, x_TC, weights_TK = made(E, 2 * M, C), made(E, C, M), made(T, C), made(T, K).abs()
    ids_TK = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    found = torch.empty(T, C, dtype=torch.float64)
    experts.apply(found, x_TC, w1, w2, weights_TK, ids_TK.int(), MoEActivation.SILU)

    def delta(kind: str, part: int, slot: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        a, b = (getattr(context, f"{kind}_lora_{which}_stacked")[part][slot, expert] for which in "ab")
        return b @ (a @ x) * (slot >= 0)

    expected = torch.zeros_like(found)
    for token, slot in enumerate(SLOTS_T):
        for weight, expert in zip(weights_TK[token], ids_TK[token].tolist(), strict=True):
            gate_up = w1[expert] @ x_TC[token]
            gate_up += torch.cat([delta("w13", part, slot, expert, x_TC[token]) for part in (0, 1)])
            (hidden,) = silu_and_mul(gate_up[None])
            expected[token] += weight * (w2[expert] @ hidden + delta("w2", 0, slot, expert, hidden))
    assert torch.allclose(found, expected, atol=1e-10)
