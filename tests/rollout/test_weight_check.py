"""Weights that must not be loaded are refused by name, before anything is overwritten."""

from pathlib import Path

import numpy as np
import pytest

from beamline.protocol.errors import WeightError
from beamline.rollout.weight_check import check_manifest
from rollout_messages import export

TENSORS = {"model.norm.weight": np.ones(8), "lm_head.weight": np.ones((4, 8))}
SHAPES = {name: array.shape for name, array in TENSORS.items()}


def test_the_models_own_weights_pass(tmp_path: Path):
    check_manifest(export(tmp_path, 1, TENSORS), SHAPES)


def test_an_unknown_tensor_is_named_with_the_nearest(tmp_path: Path):
    manifest = export(tmp_path, 1, TENSORS | {"lm_heads.weight": np.ones(3)})
    with pytest.raises(WeightError, match=r"lm_heads\.weight is unknown .* lm_head\.weight"):
        check_manifest(manifest, SHAPES)


def test_a_missing_tensor_is_named(tmp_path: Path):
    with pytest.raises(WeightError, match=r"model\.norm\.weight is missing"):
        check_manifest(export(tmp_path, 1, {"lm_head.weight": np.ones((4, 8))}), SHAPES)


def test_a_wrong_shape_is_named_with_both(tmp_path: Path):
    manifest = export(tmp_path, 1, TENSORS | {"lm_head.weight": np.ones((8, 4))})
    with pytest.raises(WeightError, match=r"lm_head\.weight has shape \[8, 4\], the model's is \[4, 8\]"):
        check_manifest(manifest, SHAPES)


def test_a_damaged_tensor_is_named(tmp_path: Path):
    manifest = export(tmp_path, 1, TENSORS)
    segment = Path(manifest.segment)
    content = bytearray(segment.read_bytes())
    content[manifest.tensors[1].offset] ^= 1
    segment.write_bytes(content)
    with pytest.raises(WeightError, match=manifest.tensors[1].name):
        check_manifest(manifest, SHAPES)


def test_a_segment_that_is_gone_is_named(tmp_path: Path):
    manifest = export(tmp_path, 1, TENSORS)
    Path(manifest.segment).unlink()
    with pytest.raises(WeightError, match="segment"):
        check_manifest(manifest, SHAPES)
