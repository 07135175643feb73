"""Where a rank's slots put the tensors of an adapter: its share of rows, the scale in B, and nothing in other slots."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from beamline.protocol.adapter import Adapter
from beamline.protocol.errors import WeightError

NUM_SLOTS, SLOT_RANK, RANK = 2, 8, 4
HIDDEN, Q, KV = 6, 8, 4


@pytest.fixture
def adapters() -> list[Adapter]:
    sizes = {"q_proj": Q, "k_proj": KV, "v_proj": KV}
    return [
        Adapter(
            module=f"model.layers.0.self_attn.{name}",
            target="linear_qkv",
            rank=RANK,
            alpha=2 * RANK,
            in_features=HIDDEN,
            out_features=size,
        )
        for name, size in sizes.items()
    ]


@pytest.fixture
def layer() -> Any:
    """The second tensor-parallel rank of two."""
    outputs = (Q // 2, KV // 2, KV // 2)
    return SimpleNamespace(
        lora_a_stacked=tuple(torch.zeros(NUM_SLOTS, 1, SLOT_RANK, HIDDEN) for _ in outputs),
        lora_b_stacked=tuple(torch.zeros(NUM_SLOTS, 1, size, SLOT_RANK) for size in outputs),
        output_slices=outputs,
        output_ids=(1, 1, 1),
    )


def made_slots(adapters: list[Adapter], layer: Any) -> Any:
    from beamline.rollout.lora.slots import LoraSlots  # imports vLLM

    layers = {"model.layers.0.self_attn.qkv_proj": layer}
    manager: Any = SimpleNamespace(num_slots=NUM_SLOTS, layers=layers, slots={})
    return LoraSlots(manager, adapters)


def whole(adapters: list[Adapter]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for adapter in adapters for name, shape in adapter.shapes.items()}


def test_a_rank_holds_its_rows_of_b_scaled_and_all_of_a(adapters, layer) -> None:
    slots, tensors = made_slots(adapters, layer), whole(adapters)
    assert slots.needs[adapters[0].b] == [((Q // 2, Q), (0, RANK))]
    assert slots.needs[adapters[2].a] == [((0, RANK), (0, HIDDEN))]
    slots.write(1, tensors.items())
    for adapter, a, b in zip(adapters, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
        own = tensors[adapter.b][adapter.out_features // 2 :]
        assert torch.equal(a[1, 0, :RANK], tensors[adapter.a]) and torch.equal(b[1, 0, :, :RANK], 2 * own)
        assert not a[1, 0, RANK:].any() and not b[1, 0, :, RANK:].any(), "room that the rank does not need stays zero"
        assert not a[0].any() and not b[0].any(), "the other slot"
    slots.clear(1)
    assert not any(tensor.any() for tensor in (*layer.lora_a_stacked, *layer.lora_b_stacked))


def test_bytes_are_those_of_all_slots(adapters, layer) -> None:
    rows = 3 * HIDDEN + (Q + 2 * KV) // 2
    assert made_slots(adapters, layer).num_bytes == 4 * NUM_SLOTS * SLOT_RANK * rows


def test_an_adapter_that_lacks_a_tensor_is_refused(adapters, layer) -> None:
    tensors = whole(adapters)
    del tensors[adapters[1].b]
    with pytest.raises(WeightError, match=r"lacks 1 tensors, one of them .*k_proj.lora_B.weight"):
        made_slots(adapters, layer).write(0, tensors.items())


def test_a_module_of_another_stage_needs_nothing(adapters, layer) -> None:
    elsewhere = [
        Adapter(
            module="model.layers.1.self_attn.o_proj",
            target="linear_proj",
            rank=RANK,
            alpha=RANK,
            in_features=Q,
            out_features=HIDDEN,
        )
    ]
    slots, tensors = made_slots(adapters + elsewhere, layer), whole(adapters + elsewhere)
    assert slots.needs.keys() == {name for adapter in adapters for name in adapter.shapes}
    slots.write(0, tensors.items())
