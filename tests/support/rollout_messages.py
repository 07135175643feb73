"""Small messages and weight segments for the rollout tests."""

import asyncio
import shutil
import tempfile
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path

import numpy as np

from beamline.protocol import messages as m
from beamline.runtime.deadline import deadline
from beamline.weights.manifest import WeightManifest, merge
from beamline.weights.shm import ShmOwner
from beamline.weights.tensors import Shard

READERS_S = 10.0

FAR_AWAY = 4e9
"""A deadline, in Unix seconds, that no test reaches."""

TASK = m.Task(prompt_id="p-0", data_source="sums", grader="math_dapo", ground_truth="4")


def prompt_group(
    tokens: list[int],
    *,
    seeds: list[int],
    max_tokens: int = 8,
    temperature: float = 1.0,
    top_p: float = 1.0,
    group_id: str = "g-000001",
    min_policy_version: int = 0,
    deadline: float = FAR_AWAY,
) -> m.PromptGroup:
    return m.PromptGroup(
        group_id=group_id,
        attempt=0,
        purpose=m.Purpose.TRAIN,
        task=TASK,
        prompt_tokens=tokens,
        sampling=m.Sampling(temperature=temperature, top_p=top_p, max_tokens=max_tokens),
        seeds=seeds,
        min_policy_version=min_policy_version,
        deadline=deadline,
    )


def policy_update(version: int, manifest: m.BlobRef, canary: m.Canary) -> m.PolicyUpdate:
    return m.PolicyUpdate(step=version, policy_version=version, manifest=manifest, canary=canary, stats={})


def phase(name: m.PhaseName, *, sequence: int, granted: bool) -> m.Phase:
    return m.Phase(sequence=sequence, step=1, phase=name, policy_version=0, granted=granted)


def export(folder: Path, version: int, tensors: Mapping[str, np.ndarray], parts: int = 1) -> WeightManifest:
    """A policy in shared memory, until `close_owners`; in a folder, policies of the same tensors have one owner.

    Args:
        tensors: float64 ones are exported as float32.
        parts: in which each tensor lies, along the dimension that tensor-parallel ranks share out.
    """
    key = (folder, parts, tuple((name, array.shape, array.dtype.name) for name, array in tensors.items()))
    if key not in _owners:
        _owners[key] = ShmOwner(Path(tempfile.mkdtemp(prefix="beamline-")) / "owner.sock")
    owner = _owners[key]
    owner.export(version, _shards(tensors, parts))
    return merge([owner.describe()])


def damage(manifest: WeightManifest, name: str) -> None:
    """Flip a bit in the memory where a tensor of an exported policy lies."""
    entry = next(entry for entry in manifest.tensors if entry.name == name)
    owner = next(one for one in _owners.values() if str(one._server.path) == manifest.places[0].socket)
    owner._pool._versions[manifest.policy_version]._bytes[entry.pieces[0].offset + 1] ^= 1


async def readers_are(number: int) -> None:
    """Wait until so many readers hold what is exported: that one has let go, its owner learns a moment later."""
    async with deadline(READERS_S, f"{number} readers of exported weights"):
        while sum(owner.num_readers for owner in _owners.values()) != number:
            await asyncio.sleep(0.01)  # the owner's thread counts, and tells nobody


def close_owners() -> None:
    """Let go of all that was exported, and of its sockets."""
    while _owners:
        _, owner = _owners.popitem()
        manifest = owner.describe()
        owner.close()
        shutil.rmtree(Path(manifest.places[0].socket).parent)


def _shards(tensors: Mapping[str, np.ndarray], parts: int) -> Iterator[Shard]:
    for name, array in tensors.items():
        values = array.astype(np.float32) if array.dtype == np.float64 else array
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        yield from Shard.whole(name, values.dtype.name, values).cut(dim, parts)


_owners: dict[Hashable, ShmOwner] = {}
