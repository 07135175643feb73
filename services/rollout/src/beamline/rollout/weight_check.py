"""Refuses weights that are not the model's, before a byte of them is fetched."""

import difflib
from collections.abc import Mapping
from typing import NamedTuple

from beamline.protocol.errors import WeightError
from beamline.weights.manifest import WeightManifest
from beamline.weights.tensors import ITEM_BYTES


class Expected(NamedTuple):
    """What errors say of what is expected, and what to do."""

    of: str
    its: str
    whole: str
    other: str


MODEL = Expected(of="the model", its="the model's", whole="export the whole model", other="")
ADAPTERS = Expected(
    of="the model's adapters",
    its="that of the model's adapter",
    whole="export all adapters of model.lora",
    other=": is it an adapter from another model, or with other settings of model.lora?",
)


def check_manifest(manifest: WeightManifest, shapes: Mapping[str, tuple[int, ...]], expected: Expected = MODEL) -> None:
    """Check that the manifest holds exactly the expected tensors.

    Args:
        manifest: what is to be loaded.
        shapes: name to shape of every tensor that the model, or its adapters, have.
        expected: which of both.

    Raises:
        WeightError: a tensor is unknown, missing, incomplete or of another shape.
    """
    found = {tensor.name: tensor for tensor in manifest.tensors}
    policy = f"policy {manifest.policy_version}"
    for name in sorted(found.keys() - shapes.keys()):
        nearest = difflib.get_close_matches(name, shapes, n=1)
        hint = f"; the nearest it has is {nearest[0]}" if nearest else ""
        raise WeightError(f"{policy}: tensor {name} is unknown to {expected.of}{hint}{expected.other}")
    if missing := sorted(shapes.keys() - found.keys()):
        raise WeightError(f"{policy}: tensor {missing[0]} is missing, one of {len(missing)}: {expected.whole}")
    for name, tensor in found.items():
        if tensor.shape != shapes[name]:
            raise WeightError(
                f"{policy}: tensor {name} has shape {list(tensor.shape)}, {expected.its} is "
                f"{list(shapes[name])}{expected.other}"
            )
        if not tensor.is_whole:
            raise WeightError(f"{policy}: the pieces of tensor {name} do not make up {list(tensor.shape)}")


def check_dtypes(manifest: WeightManifest, held: Mapping[str, str], dtype: str) -> None:
    """Check that a rank can hold the manifest's values as they are meant.

    Args:
        manifest: what is to be loaded.
        held: dtype in which the rank holds each tensor; empty where that is not known.
        dtype: the engine's own.

    Raises:
        WeightError: integers for a floating-point tensor or the other way round; or fewer bits than the rank holds, of
            a tensor that is kept more exact than the others, such as a router.
    """
    for tensor in manifest.tensors:
        kind = held.get(tensor.name)
        if not kind or kind == tensor.dtype:
            continue
        what = f"policy {manifest.policy_version}: tensor {tensor.name} is {tensor.dtype}, the engine holds {kind}"
        if _is_float(kind) != _is_float(tensor.dtype):
            raise WeightError(f"{what}: export it in a dtype of that sort")
        is_kept_exact = bool(tensor.group) or kind != dtype
        if is_kept_exact and ITEM_BYTES[tensor.dtype] < ITEM_BYTES[kind]:
            raise WeightError(f"{what}: it was rounded on the way, export it as {kind}")


def _is_float(dtype: str) -> bool:
    return "float" in dtype
