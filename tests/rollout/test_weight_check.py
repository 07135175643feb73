"""Weights that are not the model's are refused by name, before anything is fetched."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from beamline.protocol.errors import WeightError
from beamline.rollout.weight_check import ADAPTERS, check_dtypes, check_manifest
from rollout_messages import export

TENSORS = {"model.norm.weight": np.ones(8), "lm_head.weight": np.ones((4, 8))}
SHAPES = {name: array.shape for name, array in TENSORS.items()}
ROUTER = "mlp.gate.weight"


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


def test_a_tensor_of_which_a_piece_is_missing_is_named(tmp_path: Path):
    manifest = export(tmp_path, 1, TENSORS, parts=2)
    cut = [msgspec.structs.replace(tensor, pieces=tensor.pieces[:1]) for tensor in manifest.tensors]
    with pytest.raises(WeightError, match=r"pieces of tensor model\.norm\.weight do not make up \[8\]"):
        check_manifest(msgspec.structs.replace(manifest, tensors=cut), SHAPES)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"q.lora_A.weight": np.ones((2, 8))}, r"q\.lora_B\.weight is missing, one of 1: export all adapters of model"),
        (
            {"q.lora_A.weight": np.ones((2, 8)), "q.lora_B.weight": np.ones((8, 4))},
            r"q\.lora_B\.weight has shape \[8, 4\], that of the model's adapter is \[8, 2\]: is it an adapter from an",
        ),
        (
            {"k.lora_A.weight": np.ones((2, 8))},
            r"k\.lora_A\.weight is unknown to the model's adapters; the nearest it has is q\.lora_A\.weight: is it an",
        ),
    ],
)
def test_adapters_of_another_model_are_told_as_such(tmp_path: Path, tensors: dict[str, np.ndarray], words: str):
    shapes = {"q.lora_A.weight": (2, 8), "q.lora_B.weight": (8, 2)}
    with pytest.raises(WeightError, match=words):
        check_manifest(export(tmp_path, 1, tensors), shapes, ADAPTERS)


def manifest_of(folder: Path, dtype: type, group: str = ""):
    manifest = export(folder, 3, {ROUTER: np.ones((4, 8), dtype)})
    return msgspec.structs.replace(
        manifest, tensors=[msgspec.structs.replace(tensor, group=group) for tensor in manifest.tensors]
    )


@pytest.mark.parametrize(
    ("dtype", "group", "held", "engine"),
    [
        (np.float32, "router", "float32", "bfloat16"),
        (np.float32, "", "bfloat16", "bfloat16"),
        (np.float16, "", "float32", "float32"),
        (np.float16, "router", "bfloat16", "bfloat16"),
        (np.int8, "", "", "float32"),
        (np.int8, "", "int8", "float32"),
    ],
)
def test_dtypes_that_lose_nothing_pass(tmp_path: Path, dtype: type, group: str, held: str, engine: str):
    """A rounded policy in an engine of more bits is what it is; rounding to the engine's dtype is meant."""
    check_dtypes(manifest_of(tmp_path, dtype, group), {ROUTER: held}, engine)


@pytest.mark.parametrize(
    ("dtype", "group", "held", "engine", "words"),
    [
        (np.int8, "", "float32", "float32", "is int8, the engine holds float32"),
        (np.float32, "", "int8", "float32", "is float32, the engine holds int8"),
        (np.float16, "", "float32", "bfloat16", "rounded on the way, export it as float32"),
        (np.float16, "router", "float32", "float32", "rounded on the way, export it as float32"),
    ],
)
def test_dtypes_that_lose_something_are_named(
    tmp_path: Path, dtype: type, group: str, held: str, engine: str, words: str
):
    with pytest.raises(WeightError, match=rf"policy 3: tensor {ROUTER}.*{words}"):
        check_dtypes(manifest_of(tmp_path, dtype, group), {ROUTER: held}, engine)
