"""Refuses weights that must not be loaded, before a single parameter is overwritten."""

import difflib
from collections.abc import Mapping

from beamline.protocol.errors import WeightError
from beamline.weights.manifest import WeightManifest
from beamline.weights.shm import ShmReader


def check_manifest(manifest: WeightManifest, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that the manifest holds exactly the model's tensors and that every checksum fits.

    Args:
        manifest: what is to be loaded.
        shapes: name to shape of every tensor that the model has.

    Raises:
        WeightError: a tensor is unknown, missing, of another shape, or damaged.
    """
    found = {tensor.name: tuple(tensor.shape) for tensor in manifest.tensors}
    policy = f"policy {manifest.policy_version}"
    for name in sorted(found.keys() - shapes.keys()):
        nearest = difflib.get_close_matches(name, shapes, n=1)
        hint = f"; the nearest it has is {nearest[0]}" if nearest else ""
        raise WeightError(f"{policy}: tensor {name} is unknown to the model{hint}")
    if missing := sorted(shapes.keys() - found.keys()):
        raise WeightError(f"{policy}: tensor {missing[0]} is missing, one of {len(missing)}: export the whole model")
    for name, shape in found.items():
        if shape != shapes[name]:
            raise WeightError(f"{policy}: tensor {name} has shape {list(shape)}, the model's is {list(shapes[name])}")
    ShmReader.open(manifest).verify()
