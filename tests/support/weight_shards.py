"""Tensors to send from a trainer's ranks to an engine's, and what came of them."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from beamline.weights.manifest import WeightManifest, merge
from beamline.weights.plan import Needs
from beamline.weights.staging import Stage, Staged
from beamline.weights.tensors import ITEM_BYTES, STORAGE, Shard
from beamline.weights.transport import Content, DeviceBytes, Owner


@dataclass(frozen=True)
class Tensor:
    """A whole tensor, as bits."""

    name: str
    dtype: str
    values: np.ndarray
    group: str = ""


def example(seed: int = 0) -> list[Tensor]:
    """Of several dtypes, also without dimensions and without elements."""
    random = np.random.default_rng(seed)

    def bits(name: str, dtype: str, *shape: int, group: str = "") -> Tensor:
        kind = STORAGE[ITEM_BYTES[dtype]]
        return Tensor(name, dtype, random.integers(0, np.iinfo(kind).max, shape, kind), group)

    return [
        bits("model.a.weight", "float32", 8, 33),
        bits("model.b.weight", "bfloat16", 6, 5),
        bits("model.router.weight", "float32", 4, 6, group="router"),
        bits("model.scale", "float32"),
        bits("model.ids", "int64", 4),
        bits("model.scales", "float8_e8m0fnu", 3),
        bits("model.empty", "float32", 0, 4),
        bits("model.large", "float32", 700, 1000),
    ]


def shards_of(tensors: list[Tensor], rank: int = 0, num_ranks: int = 1) -> list[Shard]:
    """What a rank has when tensors are cut along the last dimension where that can be: the values are strided then."""
    shards = []
    for tensor in tensors:
        whole = Shard.whole(tensor.name, tensor.dtype, tensor.values, tensor.group)
        dim = max(0, tensor.values.ndim - 1)
        parts = list(whole.cut(dim, num_ranks)) if tensor.values.ndim else [whole]
        shards += [part for number, part in enumerate(parts) if number % num_ranks == rank]
    return shards


def export(owner: Owner, policy_version: int) -> WeightManifest:
    """The example of that seed, from one rank, as its readers get to know of it."""
    owner.export(policy_version, iter(shards_of(example(policy_version))))
    return WeightManifest.decode(merge([owner.describe()]).encode())


def bits_of(staged: Staged) -> dict[str, np.ndarray]:
    """Every tensor that was fetched, copied."""
    return {
        entry.name: np.frombuffer(host_bytes(content), STORAGE[ITEM_BYTES[entry.dtype]]).reshape(entry.shape)
        for entry, content in staged.tensors()
    }


def host_bytes(content: Content) -> bytes:
    """A copy, from wherever it lies."""
    return b"".join(content.host_parts()) if isinstance(content, DeviceBytes) else bytes(content)


def assert_equal(read: dict[str, np.ndarray], written: list[Tensor]) -> None:
    """All of it, and nothing else."""
    assert list(read) == [tensor.name for tensor in written]
    for tensor in written:
        np.testing.assert_array_equal(read[tensor.name], tensor.values, strict=True)


def fetched(manifest: WeightManifest, needs: Needs | None = None) -> dict[str, np.ndarray]:
    """Fetch, copy, let go."""
    stage = Stage(needs)
    try:
        staged = stage.fetch(manifest)
        read = bits_of(staged)
        staged.fence()
        return read
    finally:
        stage.close()


def until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    """What threads do after the other end has let go, an owner's above all, comes true a moment later."""
    done = threading.Event()
    for _ in range(int(deadline_s / 0.01)):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("it did not come true")
