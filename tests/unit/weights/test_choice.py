"""Which transport a run has, by where its two sides are and how large a policy is."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from beamline.protocol.errors import ConfigError, WeightError
from beamline.weights.choice import choose, free_memory_bytes, owner_of, reader_of
from beamline.weights.manifest import CudaPlace
from beamline.weights.strided import as_rows

GIB = 1 << 30
SMALL, LARGE = (4 * GIB, 9 * GIB), (4 * GIB, 7 * GIB)
"""Bytes of a policy, and of free memory: twice the policy fits, or not."""


@pytest.mark.parametrize(
    ("one_host", "device", "one_device", "sizes", "chosen"),
    [
        (True, "cuda", True, SMALL, "cuda_ipc"),
        (True, "cuda", True, LARGE, "cuda_ipc"),
        (True, "cuda", False, SMALL, "shm"),
        (True, "cpu", False, SMALL, "shm"),
        (True, "cpu", True, SMALL, "shm"),
        (True, "cpu", False, (4 * GIB, 8 * GIB), "shm"),
        (True, "cpu", False, LARGE, "checkpoint"),
        (False, "cpu", False, SMALL, "nixl"),
        (False, "cuda", False, LARGE, "nixl"),
        (False, "cuda", True, SMALL, "nixl"),
    ],
)
def test_auto_goes_by_place_and_size(
    one_host: bool, device: Literal["cpu", "cuda"], one_device: bool, sizes: tuple[int, int], chosen: str
) -> None:
    num_bytes, free_bytes = sizes
    assert chosen == choose(
        "auto", one_host=one_host, device=device, one_device=one_device, num_bytes=num_bytes, free_bytes=free_bytes
    )


@pytest.mark.parametrize(
    ("transport", "one_host", "device", "one_device", "text"),
    [
        ("shm", False, "cpu", False, "shm needs trainer and engines on one host: choose nixl, or checkpoint"),
        ("cuda_ipc", True, "cpu", False, "cuda_ipc needs one GPU for both sides, but parameters are in main memory"),
        ("cuda_ipc", True, "cuda", False, "but trainer and engines do not share a GPU: choose auto"),
        ("cuda_ipc", False, "cuda", True, "but trainer and engines do not share a GPU: choose auto"),
    ],
)
def test_what_cannot_work_is_refused(
    transport: str, one_host: bool, device: Literal["cpu", "cuda"], one_device: bool, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        choose(transport, one_host=one_host, device=device, one_device=one_device, num_bytes=1, free_bytes=9)


@pytest.mark.parametrize("transport", ["shm", "nixl", "checkpoint"])
def test_what_is_asked_for_is_had_where_it_can_work(transport: str) -> None:
    chosen = choose(transport, one_host=True, device="cpu", one_device=False, num_bytes=9 * GIB, free_bytes=1)
    assert chosen == transport


def test_another_transport_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights\.transport='ftp' is none of shm, cuda_ipc, nixl, checkpoint"):
        owner_of("ftp", tmp_path, 0)


def test_free_memory_is_that_of_this_host() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < free_memory_bytes() < total


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="has a GPU")
def test_a_machine_without_a_gpu_is_told_what_cuda_ipc_needs(tmp_path: Path) -> None:
    text = r"weights\.transport=cuda_ipc needs an NVIDIA GPU, its driver and the package cuda-bindings; or choose auto"
    with pytest.raises(ConfigError, match=text):
        owner_of("cuda_ipc", tmp_path, 0)
    with pytest.raises(ConfigError, match=text):
        reader_of(CudaPlace(num_bytes=0, socket="/x", device="GPU-0", chunks=[], event=b""))
    assert list(tmp_path.iterdir()) == []


WHOLE = np.zeros((4, 6, 8), np.uint16)


@pytest.mark.parametrize(
    ("view", "rows"),
    [
        (WHOLE, (1, 384, 384)),
        (WHOLE[1:3], (1, 192, 192)),
        (WHOLE[:, 2:4], (4, 32, 96)),
        (WHOLE[:, :, 1:3], (24, 4, 16)),
        (WHOLE[:, 1:2, 1:3], (4, 4, 96)),
        (WHOLE[:, ::2, 1:3], (12, 4, 32)),
        (WHOLE[:, 1:4, 1:3], None),
        (WHOLE.transpose(2, 1, 0), None),
        (WHOLE[::-1], None),
        (np.broadcast_to(WHOLE[0], (4, 6, 8)), None),
        (WHOLE[0, 0, 0:1].reshape(()), (1, 2, 2)),
    ],
)
def test_what_is_cut_from_a_tensor_is_rows(view: np.ndarray, rows: tuple[int, int, int] | None) -> None:
    assert as_rows(view.shape, view.strides, view.itemsize) == rows


def test_a_contiguous_array_need_not_say_its_strides() -> None:
    assert as_rows((4, 6), None, 2) == (1, 48, 48)


def test_a_shard_on_a_gpu_is_refused_by_transports_of_main_memory(tmp_path: Path) -> None:
    from beamline.weights.tensors import Shard

    class OnGpu:
        shape, ndim, itemsize, __cuda_array_interface__ = (2,), 1, 4, None

        def __getitem__(self, key: object, /) -> "OnGpu":
            return self

    owner = owner_of("shm", tmp_path, 0)
    with pytest.raises(WeightError, match="tensor w lies on a GPU: copy it to main memory, or use transport cuda_ipc"):
        owner.export(0, [Shard.whole("w", "float32", OnGpu())])
    owner.close()
