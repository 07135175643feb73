"""Three buffers: reading, updating and writing at the same time, and no memory beyond them."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from beamline.diskoptim import disk_adamw, files
from beamline.diskoptim.buffers import Buffer
from beamline.diskoptim.disk_adamw import DiskAdamW
from beamline.diskoptim.layout import Bucket

Make = Callable[..., DiskAdamW]
DEADLINE_S = 10.0


class Meeting:
    """Who works on bucket i + 1, i and i - 1 must be there at once: nobody gets on before all three have come."""

    def __init__(self, num_buckets: int) -> None:
        self._num = num_buckets
        parties = [1 + (i + 1 < num_buckets) + (i > 0) for i in range(num_buckets)]
        self._barriers = [threading.Barrier(count, timeout=DEADLINE_S) for count in parties]

    def attend(self, index: int) -> None:
        """Raises threading.BrokenBarrierError when the others do not come."""
        if 0 <= index < self._num:
            self._barriers[index].wait()


class MeetingBuffer(Buffer):
    """Its reads and writes wait for the update that runs beside them."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.meeting: Meeting | None = None
        self.buckets: tuple[Bucket, ...] = ()

    def read(self, file: int, bucket: Bucket) -> None:
        if self.meeting:
            self.meeting.attend(self.buckets.index(bucket) - 1)
        super().read(file, bucket)

    def write(self, file: int, bucket: Bucket) -> None:
        if self.meeting:
            self.meeting.attend(self.buckets.index(bucket) + 1)
        super().write(file, bucket)


def test_reading_updating_and_writing_run_side_by_side(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_adamw, "Buffer", MeetingBuffer)
    optimizer = make()
    buckets = optimizer._present.header.buckets
    assert len(buckets) >= 5
    meeting, update = Meeting(len(buckets)), optimizer._update
    for buffer in optimizer._buffers:
        buffer.meeting, buffer.buckets = meeting, buckets

    def attending(index: int, buffer: Buffer, **given: object) -> None:
        meeting.attend(index)
        update(index, buffer, **given)

    optimizer._update = attending
    optimizer.step()
    assert optimizer.num_steps == 1


def test_memory_is_three_buckets_and_does_not_grow(tmp_path: Path) -> None:
    """Largest resident size over five steps of a state of 96 MB, over what parameters and gradients took before."""
    bucket_bytes, num_params = 8 * 2**20, 8_000_000
    train(tmp_path / "warm", 1000, bucket_bytes)
    parameter = torch.nn.Parameter(torch.ones(num_params))
    parameter.grad = torch.ones(num_params)
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest size is counted from here on
    optimizer = DiskAdamW([parameter], tmp_path / "large", bucket_bytes=bucket_bytes, max_grad_norm=1.0)
    grown = []
    for _ in range(5):
        optimizer.step()
        grown.append(resident_bytes("VmHWM") - before)
    optimizer.close()
    assert grown[-1] <= 3 * bucket_bytes
    assert grown[-1] - grown[1] <= bucket_bytes // 16


def train(directory: Path, num_params: int, bucket_bytes: int) -> None:
    """One step, which loads what any step needs."""
    parameter = torch.nn.Parameter(torch.ones(num_params))
    parameter.grad = torch.ones(num_params)
    optimizer = DiskAdamW([parameter], directory, bucket_bytes=bucket_bytes, max_grad_norm=1.0)
    optimizer.step()
    optimizer.close()


def resident_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def test_a_filesystem_without_direct_io_is_told_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_direct_io(monkeypatch)
    with caplog.at_level(logging.WARNING):
        optimizer = make()
        optimizer.step()
        optimizer.step()
    said = [record.getMessage() for record in caplog.records if "O_DIRECT" in record.getMessage()]
    assert said == [f"{optimizer.directory} has no O_DIRECT: optimizer state goes through the page cache, more slowly"]


def test_direct_io_is_not_pretended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_direct_io(monkeypatch)
    with pytest.raises(ValueError, match=r"io=direct, and .* has no O_DIRECT"):
        make(io="direct")


def test_both_ways_write_the_same(make: Make, tmp_path: Path) -> None:
    sums = []
    for io in ("auto", "buffered"):
        optimizer = make(tmp_path / io, io=io)
        optimizer.step()
        sums.append([optimizer.read(name).exp_avg.sum().item() for name in ("scale", "weight", "last")])
    assert sums[0] == sums[1]


def refuse_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ramfs and some network filesystems do."""
    opened = files.os.open

    def refusing(path: object, flags: int, *rest: int) -> int:
        if flags & files.os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *rest)

    monkeypatch.setattr(files.os, "open", refusing)
