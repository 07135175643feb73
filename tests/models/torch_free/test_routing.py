"""A model's routing as its configuration says, and what a trace must be to be that model's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from beamline.models import tiny
from beamline.models.routing import RoutingShape, TraceError, num_trace_rows

SHAPE = RoutingShape(num_layers=3, top_k=2, num_experts=8, sparse_layers=(1, 2))
NUM_ROWS = 5


def trace() -> np.ndarray:
    """[5, 3, 2]: two different experts a token; what the dense first layer's slot holds means nothing."""
    ids_RLK = np.zeros((NUM_ROWS, 3, 2), np.uint8)
    ids_RLK[:, 1] = [3, 0]
    ids_RLK[:, 2] = [0, 7]
    ids_RLK[:, 0] = 255
    return ids_RLK


def changed(row: int, layer: int, experts: list[int]) -> np.ndarray:
    ids_RLK = trace()
    ids_RLK[row, layer] = experts
    return ids_RLK


def test_a_whole_trace_is_handed_back():
    whole = trace()
    checked = SHAPE.check([whole, None], [NUM_ROWS, 0], "group g")
    assert checked[0] is whole and checked[1].shape == (0, 3, 2)
    many = replace(SHAPE, num_experts=257)
    assert many.check([trace().astype(np.uint16)], [NUM_ROWS], "group g")[0].dtype == np.uint16


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda: None, "expected 5 rows of expert ids, found none"),
        (lambda: trace()[:-1], "expected 5 rows, found 4"),
        (lambda: np.concatenate((trace(), trace())), "expected 5 rows, found 10"),
        (lambda: trace()[:, 1:], "expected 3 layers of 2 experts a token as uint8, found 2 of 2 as uint8"),
        (lambda: trace()[..., :1], "expected 3 layers of 2 experts a token as uint8, found 3 of 1 as uint8"),
        (lambda: trace().astype(np.uint16), "as uint8, found 3 of 2 as uint16"),
        (lambda: changed(4, 1, [8, 1]), r"2 different experts below 8 in row 4, layer 1, found \[8, 1\]$"),
        (lambda: changed(2, 2, [5, 5]), r"2 different experts below 8 in row 2, layer 2, found \[5, 5\]$"),
        (lambda: changed(0, 2, [0, 0]), r"in row 0, layer 2, found \[0, 0\]: nothing was written$"),
    ],
    ids=["none", "a row less", "rows twice", "layers", "top_k", "dtype", "range", "twice", "unwritten"],
)
def test_a_trace_of_another_kind_is_named(spoil: Callable[[], np.ndarray | None], words: str):
    with pytest.raises(TraceError, match=rf"^routed experts of group g, trajectory 3: .*{words}"):
        SHAPE.check([trace(), None, trace(), spoil()], [NUM_ROWS, 0, NUM_ROWS, NUM_ROWS], "group g")


def test_every_place_of_a_repeated_expert_is_seen():
    shape = RoutingShape(num_layers=1, top_k=4, num_experts=300, sparse_layers=(0,))
    for first in range(4):
        for second in range(first + 1, 4):
            ids_RLK = np.array([[[10, 20, 30, 299]]], np.uint16)
            shape.check([ids_RLK], [1], "group g")
            ids_RLK[0, 0, second] = ids_RLK[0, 0, first]
            with pytest.raises(TraceError):
                shape.check([ids_RLK], [1], "group g")


def test_a_trajectory_has_a_row_for_every_token_that_was_read_for_another():
    assert [num_trace_rows(7, response) for response in (0, 1, 2)] == [0, 7, 8]


def test_the_shape_is_the_model_s(tmp_path: Path):
    for name, sparse_layers in (("tiny-beam", (1, 2, 3)), ("tiny-qwen3-moe", (0, 1, 2, 3))):
        tiny.build(tiny.SPECS[name], tmp_path / name, seed=0)
        expected = RoutingShape(num_layers=4, top_k=4, num_experts=16, sparse_layers=sparse_layers)
        assert RoutingShape.of(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("config", "sparse_layers"),
    [
        ({"model_type": "beam"}, (3, 4, 5)),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [5], "decoder_sparse_step": 2}, (1, 3)),
        ({"model_type": "beam", "mlp_layer_types": ["sparse", "dense"] * 3}, (0, 2, 4)),
        ({"model_type": "qwen3", "num_experts": None}, ()),
    ],
)
def test_layers_that_a_configuration_does_not_list_follow_from_its_kind(config, sparse_layers):
    config = {"num_hidden_layers": 6, "num_experts": 4, "num_experts_per_tok": 2} | config
    assert RoutingShape.of_config(config).sparse_layers == sparse_layers
