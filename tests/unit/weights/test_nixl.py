"""NIXL between two processes: owners that die, hang or come back, policies that change under a reader, hostile bytes.

What every transport promises is in `test_transports.py`. Run as a program this file is an owner: for every line on its
standard input it exports the policy of that number and writes the manifest.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from beamline.protocol.errors import WeightError
from beamline.weights import nixl
from beamline.weights.manifest import NixlPlace, WeightManifest, merge
from beamline.weights.nixl import NixlOwner, NixlReader
from beamline.weights.staging import Stage
from beamline.weights.tensors import Shard

NUM_TENSORS = 4
TENSOR_ELEMENTS = 1 << 20
DEADLINE_S = 1.0
SLACK_S = 10.0
"""For a machine that does other work too."""


def policy(version: int) -> list[Shard]:
    values = np.random.default_rng(version).integers(0, 2**32, (NUM_TENSORS, TENSOR_ELEMENTS), np.uint32)
    return [Shard.whole(f"w{number}", "float32", row) for number, row in enumerate(values)]


class OwnerProcess:
    """A trainer's end, which can be stopped and killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def export(self, version: int) -> WeightManifest:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{version}\n")
        self._process.stdin.flush()
        lines = (line.removeprefix("manifest ") for line in self._process.stdout if line.startswith("manifest "))
        return WeightManifest.decode(bytes.fromhex(next(lines)))

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(SLACK_S)

    def end(self) -> int:
        """By closing its input; its exit status."""
        self._process.communicate(timeout=SLACK_S)
        return self._process.returncode


@pytest.fixture
def start() -> Iterator[Callable[[], OwnerProcess]]:
    started: list[OwnerProcess] = []

    def start() -> OwnerProcess:
        started.append(OwnerProcess())
        return started[-1]

    yield start
    for owner in started:
        owner.kill()


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[NixlReader]:
    reader = NixlReader(DEADLINE_S)
    monkeypatch.setattr("beamline.weights.staging.reader_of", lambda _: reader)
    yield reader
    reader.close()


def fetch(manifest: WeightManifest) -> None:
    """As an engine does it, through the reader of the fixture; what came is the policy, or it raises."""
    staged = Stage().fetch(manifest)
    for (_, content), shard in zip(staged.tensors(), policy(manifest.policy_version), strict=True):
        np.testing.assert_array_equal(np.frombuffer(content, np.uint32), shard.values)
    staged.fence()


def place_of(manifest: WeightManifest) -> NixlPlace:
    (place,) = manifest.places
    assert isinstance(place, NixlPlace)
    return place


def refused(manifest: WeightManifest, why: str = "") -> None:
    """In time, and naming policy and owner."""
    begin = time.monotonic()
    about = f"policy {manifest.policy_version}: cannot read its weights from {place_of(manifest).agent}: .*{why}"
    with pytest.raises(WeightError, match=about):
        fetch(manifest)
    assert time.monotonic() - begin < DEADLINE_S + SLACK_S


def test_policies_cross_into_memory_that_stays_registered(
    start: Callable[[], OwnerProcess], reader: NixlReader
) -> None:
    owner = start()
    for version in range(4):
        fetch(owner.export(version))
    assert len(reader._session.memory) == 1
    first = Stage().fetch(owner.export(4))
    for version in range(5, 8):
        fetch(owner.export(version))
    assert len(reader._session.memory) == 2
    first.verify()
    first.fence()
    assert owner.end() == 0


def test_only_the_needed_ranges_come(start: Callable[[], OwnerProcess], reader: NixlReader) -> None:
    manifest = start().export(0)
    whole = np.concatenate([shard.values for shard in policy(0)]).view(np.uint8)
    attached = reader.attach(manifest.places[0], 0)
    ranges = [(512, 1000), (70_000, 10), (5_000_001, 300_000)]
    attached.fill(ranges)
    for offset, size in ranges:
        assert bytes(attached.content(offset, size)) == whole[offset : offset + size].tobytes()
    assert bytes(attached.content(5_000_101, 7)) == whole[5_000_101:5_000_108].tobytes()
    (memory,) = reader._session.memory.values()
    assert len(memory) < sum(size for _, size in ranges) + 1024
    attached.fence()


def test_memory_of_a_layout_that_is_gone_is_given_back(start: Callable[[], OwnerProcess], reader: NixlReader) -> None:
    manifest = start().export(0)
    for version, size in enumerate([1000, 1000, 3000, 3000, 3000, 3000, 3000]):
        attached = reader.attach(manifest.places[0], version)
        attached.fill([(0, size)])
        attached.fence()
    assert [len(memory) for memory in reader._session.memory.values()] == [3000]


def test_a_policy_that_changes_under_a_slow_reader_is_found(
    start: Callable[[], OwnerProcess], reader: NixlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = start()
    manifest = owner.export(0)
    attach = reader.attach

    def slowly(place: NixlPlace, policy_version: int) -> object:
        attached = attach(place, policy_version)
        owner.export(1), owner.export(2)
        return attached

    monkeypatch.setattr(reader, "attach", slowly)
    with pytest.raises(WeightError, match=r"policy 0: tensor w0 has checksum .*written over"):
        fetch(manifest)


def test_an_owner_that_was_killed_is_told_and_another_one_is_read(
    start: Callable[[], OwnerProcess], reader: NixlReader
) -> None:
    owner, stranger = start(), start()
    met, unmet = owner.export(0), stranger.export(0)
    fetch(met)
    owner.kill()
    stranger.kill()
    for manifest in (met, met, unmet):
        refused(manifest)
    fetch(start().export(1))


def test_an_owner_that_hangs_is_given_up_and_read_when_it_answers_again(
    start: Callable[[], OwnerProcess], reader: NixlReader
) -> None:
    owner = start()
    manifest = owner.export(0)
    owner.signal(signal.SIGSTOP)
    before = len(os.listdir("/proc/self/task"))
    for _ in range(2):
        refused(manifest, f"not all came within {DEADLINE_S:g} s")
    assert len(os.listdir("/proc/self/task")) == before, "agents that were given up are still there"
    owner.signal(signal.SIGCONT)
    fetch(manifest)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_owner_that_ends_in_the_middle_is_told(
    start: Callable[[], OwnerProcess], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """By TCP a transfer takes long enough to be in the middle of it; after that nothing comes late."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    owner, reader = start(), NixlReader(DEADLINE_S)
    monkeypatch.setattr("beamline.weights.staging.reader_of", lambda _: reader)
    manifest = owner.export(0)
    pause = nixl._pause

    def in_the_middle() -> None:
        owner.signal(number)
        pause()

    with monkeypatch.context() as patch:
        patch.setattr(nixl, "_pause", in_the_middle)
        with pytest.raises(WeightError, match="policy 0: "):
            fetch(manifest)
    owner.signal(signal.SIGCONT)
    another = start()
    for version in range(3):
        fetch(another.export(version))
    reader.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda metadata: b"",
        lambda metadata: b"cos\nsystem\n(S'id'\ntR.",
        lambda metadata: metadata[:-20],
        lambda metadata: metadata[:100],
        lambda metadata: metadata.replace(b"beamline-owner", b"beamline-other"),
    ],
    ids=["nothing", "a pickle", "cut off", "cut short", "another's"],
)
def test_metadata_that_are_not_the_owners_are_refused(
    start: Callable[[], OwnerProcess], reader: NixlReader, spoil: Callable[[bytes], bytes]
) -> None:
    manifest = start().export(0)
    place = msgspec.structs.replace(place_of(manifest), metadata=spoil(place_of(manifest).metadata))
    refused(msgspec.structs.replace(manifest, places=[place]))
    fetch(manifest)


def test_memory_that_the_owner_did_not_register_is_refused(
    start: Callable[[], OwnerProcess], reader: NixlReader
) -> None:
    manifest = start().export(0)
    place = msgspec.structs.replace(place_of(manifest), address=place_of(manifest).address + 4096)
    refused(msgspec.structs.replace(manifest, places=[place]))
    fetch(manifest)


HOSTILE = {
    "a pickle": b"cos\nsystem\n(S'id'\ntR.",
    "zeros": bytes(4096),
    "ones": b"\xff" * 100_000,
    "a request": b"GET / HTTP/1.1\r\n\r\n",
    "UCX's first word, then a pickle": (0xCAFEBABE12345678).to_bytes(8, "little") + b"cos\nsystem\n(S'id'\ntR.",
}


def test_hostile_bytes_reach_only_loopback_and_the_owner_serves_on(
    start: Callable[[], OwnerProcess], reader: NixlReader
) -> None:
    owner = start()
    fetch(owner.export(0))
    tcp, datagram = sockets(owner.pid)
    assert tcp and {host for host, _ in tcp} == {"127.0.0.1"}
    for payload in HOSTILE.values():
        for address in tcp:
            with socket.create_connection(address, timeout=SLACK_S) as peer:
                peer.sendall(payload)
                with contextlib.suppress(OSError):  # the owner may have refused it by now
                    peer.shutdown(socket.SHUT_WR)
        for name in datagram:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer:
                peer.sendto(payload[:1024], name)
        fetch(owner.export(1))
    fresh = NixlReader(SLACK_S)
    attached = fresh.attach(owner.export(2).places[0], 2)
    attached.fill([(0, 4096)])
    assert bytes(attached.content(0, 4096)) == policy(2)[0].values.tobytes()[:4096]
    attached.fence()
    fresh.close()
    assert owner.end() == 0


def sockets(pid: int) -> tuple[list[tuple[str, int]], list[str]]:
    """Where a process listens: TCP addresses, and names of abstract Unix datagram sockets."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    tcp = []
    for line in _rows("/proc/net/tcp") + _rows("/proc/net/tcp6"):
        if line[3] == "0A" and line[9] in inodes:
            host, port = line[1].split(":")
            tcp.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]) if len(host) == 8 else host, int(port, 16)))
    datagram = ["\0" + line[7][1:] for line in _rows("/proc/net/unix") if line[6] in inodes and len(line) > 7]
    return tcp, datagram


def _rows(path: str) -> list[list[str]]:
    return [line.split() for line in Path(path).read_text().splitlines()[1:]]


def main() -> None:
    owner = NixlOwner()
    for line in sys.stdin:
        owner.export(int(line), policy(int(line)))
        print("manifest", merge([owner.describe()]).encode().hex(), flush=True)
    owner.close()


if __name__ == "__main__":
    main()
