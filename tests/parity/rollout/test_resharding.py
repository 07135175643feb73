"""Each rank fetches what it holds and no more, and holds it to the bit."""

from pathlib import Path

import numpy as np
import pytest

from beamline.weights.tensors import Box
from loaded_weights import assert_loads_bit_for_bit
from rollout_messages import export

pytestmark = pytest.mark.asyncio(loop_scope="session")

COLUMNS = ("o_proj.weight", "down_proj.weight")
WHOLE = ("norm.weight", "layernorm.weight", ".mlp.gate.weight", "e_score_correction_bias")
FIRST_LAYERS = ("model.layers.0.", "model.layers.1.")
OUTER_OF_STAGE = {
    "tiny-beam": [["model.embed_tokens.weight"], ["model.norm.weight", "lm_head.weight"]],
    # vLLM's own model has all three on every stage.
    "tiny-qwen3-moe": [["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]] * 2,
}


def expected_box(model: str, name: str, shape: tuple[int, ...], layout: str, rank: int) -> Box | None:
    """What one rank of two needs of a tensor: worked out by hand for our models of four layers."""
    whole = [(0, size) for size in shape]
    if layout == "pipeline_parallel":
        is_own_layer = ".layers." in name and name.startswith(FIRST_LAYERS) == (rank == 0)
        return tuple(whole) if is_own_layer or name in OUTER_OF_STAGE[model][rank] else None
    if not name.endswith(WHOLE):
        dim = 1 if name.endswith(COLUMNS) else 0
        half = shape[dim] // 2
        whole[dim] = (rank * half, rank * half + half)
    return tuple(whole)


def num_elements(box: Box) -> int:
    return int(np.prod([end - start for start, end in box]))


async def test_one_rank_needs_everything_and_holds_it_to_the_bit(engine, model, tmp_path: Path) -> None:
    tensors = model.tensors(other=True)
    (needed,) = await engine._call("needed_boxes")
    assert {name: tuple(map(tuple, box)) for name, (box,) in needed.items()} == {
        name: tuple((0, size) for size in array.shape) for name, array in tensors.items()
    }
    num_bytes = await engine.stage_weights(export(tmp_path, 1, tensors))
    assert num_bytes == sum(array.nbytes for array in tensors.values())
    await assert_loads_bit_for_bit(engine, export(tmp_path, 1, tensors, parts=2), tensors)
    await assert_loads_bit_for_bit(engine, export(tmp_path, 0, model.tensors()), model.tensors())


async def test_each_of_two_ranks_needs_its_share(ranks, layout: str, model, tmp_path: Path) -> None:
    tensors = model.tensors()
    num_needed = 0
    for rank, needed in enumerate(await ranks._call("needed_boxes")):
        boxes = {name: expected_box(model.name, name, array.shape, layout, rank) for name, array in tensors.items()}
        expected = {name: box for name, box in boxes.items() if box is not None}
        assert {name: tuple(map(tuple, box)) for name, (box,) in needed.items()} == expected
        num_needed += sum(map(num_elements, expected.values()))
    assert await ranks.stage_weights(export(tmp_path, 0, tensors, parts=2)) == 4 * num_needed
    await ranks.drop_staged()


async def test_two_ranks_hold_a_policy_to_the_bit(ranks, model, tmp_path: Path) -> None:
    other = model.tensors(other=True)
    await assert_loads_bit_for_bit(ranks, export(tmp_path, 1, other, parts=2), other)
    await assert_loads_bit_for_bit(ranks, export(tmp_path, 2, other, parts=4), other)
    await assert_loads_bit_for_bit(ranks, export(tmp_path, 0, model.tensors()), model.tensors())
