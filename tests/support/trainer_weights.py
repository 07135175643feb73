"""What a reader finds in a policy that the trainer has exported."""

from collections.abc import Buffer

import torch

from beamline.weights.manifest import WeightManifest
from beamline.weights.staging import Stage


def staged_weights(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """Every tensor, fetched and verified, in memory of its own."""
    stage = Stage()
    staged = stage.fetch(manifest)
    try:
        return {entry.name: tensor(content, entry.dtype).view(entry.shape) for entry, content in staged.tensors()}
    finally:
        staged.fence()
        stage.close()


def tensor(content: Buffer, dtype: str) -> torch.Tensor:
    """Bytes as a flat tensor of its own."""
    return torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype))
