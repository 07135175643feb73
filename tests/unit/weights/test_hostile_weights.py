"""Bytes that no trainer and no engine would send, at every door that the weights open: a refusal, and work goes on."""

import ast
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

import beamline.weights
from beamline.protocol.errors import WeightError
from beamline.weights import passing
from beamline.weights.choice import owner_of
from beamline.weights.manifest import ShmPlace, WeightManifest
from beamline.weights.transport import Owner
from weight_shards import assert_equal, example, export, fetched

PICKLE = b"cos\nsystem\n(S'id'\ntR."
RANDOM = np.random.default_rng(0).bytes(4096)
DEEP = b"\x91" * 100_000 + b"\xc0"
"""Arrays in arrays: a decoder that calls itself runs out of stack."""
WIDE = b"\xdd\xff\xff\xff\xff"
"""An array that says it has four milliards of elements."""


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


def attach(**fields: object) -> bytes:
    return framed(msgspec.msgpack.encode({"type": "Attach/1", **fields}))


REQUESTS = {
    "a pickle": PICKLE,
    "a framed pickle": framed(PICKLE),
    "a pickle as a version": attach(policy_version=PICKLE),
    "random bytes": RANDOM,
    "framed random bytes": framed(RANDOM[:4096]),
    "a huge frame": b"\xff\xff\xff\x7f" + b"x" * 64,
    "four gigabytes": b"\xff\xff\xff\xff",
    "deep": framed(DEEP[-4000:]),
    "wide": framed(WIDE),
    "an answer": framed(msgspec.msgpack.encode(passing.Granted(5))),
    "an unknown field": attach(policy_version=0, x=1),
    "a number as text": attach(policy_version="0"),
    "a policy that is not there": attach(policy_version=-1),
    "a policy too large for a number": attach(policy_version=2**63),
    "half a frame": b"\x08\x00",
    "a frame cut short": framed(b"\x81")[:-1],
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "nothing": b"",
}


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = owner_of("shm", tmp_path / "weights", 0)
    yield owner
    owner.close()


def ask(path: str, payload: bytes) -> tuple[bytes, list[int]]:
    """What a socket answers, and hands over."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        peer.connect(path)
        peer.sendall(payload)
        peer.shutdown(socket.SHUT_WR)
        answer, descriptors, _, _ = socket.recv_fds(peer, 4096, 4)
        return answer, descriptors


def socket_of(manifest: WeightManifest) -> str:
    (place,) = manifest.places
    assert isinstance(place, ShmPlace)
    return place.socket


@pytest.mark.parametrize("payload", REQUESTS.values(), ids=REQUESTS.keys())
def test_a_hostile_request_gets_a_refusal_and_no_memory(owner: Owner, payload: bytes) -> None:
    manifest = export(owner, 0)
    answer, descriptors = ask(socket_of(manifest), payload)
    assert b"Refused/1" in answer and not descriptors
    assert_equal(fetched(manifest), example(0))


def test_a_peer_that_breaks_off_is_no_event(owner: Owner) -> None:
    manifest = export(owner, 0)
    for payload in REQUESTS.values():
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(socket_of(manifest))
            peer.sendall(payload)
    assert_equal(fetched(manifest), example(0))


def test_a_peer_that_says_nothing_is_hung_up_on(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "REQUEST_DEADLINE_S", 0.1)
    manifest = export(owner, 0)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        peer.connect(socket_of(manifest))
        assert b"Refused/1" in peer.recv(4096)
        assert peer.recv(4096) == b""


def test_only_the_owners_user_reaches_a_socket(owner: Owner) -> None:
    path = Path(socket_of(export(owner, 0)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


ANSWERS = {
    **{name: payload for name, payload in REQUESTS.items() if name != "an answer"},
    "an answer without memory": framed(msgspec.msgpack.encode(passing.Granted(5))),
    "a refusal": framed(msgspec.msgpack.encode(passing.Refused("no"))),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_a_hostile_owner_is_named(tmp_path: Path, answer: bytes) -> None:
    path = tmp_path / "forged.sock"
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as forged:
        forged.bind(str(path))
        forged.listen()

        def reply() -> None:
            connection, _ = forged.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        owner = threading.Thread(target=reply)
        owner.start()
        with pytest.raises(WeightError, match=f"policy 3: .*{path}"):
            passing.Handed(path, 3)
        owner.join()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_owner_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "ATTACH_DEADLINE_S", 0.1)
    path = tmp_path / "mute.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen()
        with pytest.raises(WeightError, match=rf"policy 3: cannot get its weights from {path}: no answer within 0.1 s"):
            passing.Handed(path, 3)


def wire(**changes: object) -> bytes:
    place = {"type": "shm", "socket": "/x", "num_bytes": 1000}
    piece = [0, 0, [0], [2], "0" * 16]
    tensor = {"name": "w", "dtype": "float32", "shape": [2], "pieces": [piece]}
    whole = {"type": "WeightManifest/1", "policy_version": 1, "places": [place], "tensors": [tensor]}
    return msgspec.msgpack.encode({**whole, **changes})


MANIFESTS = {
    "nothing": b"",
    "text": b"abc",
    "a pickle": PICKLE,
    "random bytes": RANDOM,
    "deep": DEEP,
    "wide": WIDE,
    "a map that says it is wide": b"\xdf\xff\xff\xff\xff",
    "bytes that say they are long": b"\xc6\xff\xff\xff\xff",
    "deep in a field": wire()[:-1] + DEEP,
    "another message": wire(type="PolicyUpdate/1"),
    "a manifest of another version": wire(type="WeightManifest/2"),
    "an unknown place": wire(places=[{"type": "ftp", "num_bytes": 1}]),
    "a pickle as a place": wire(places=PICKLE),
    "a pickle as tensors": wire(tensors=[PICKLE]),
    "no tensors": wire(tensors=None),
    "an unknown field": wire(hook="os.system"),
    "a name that is no text": wire(tensors=[{"name": b"\xff", "dtype": "float32", "shape": [], "pieces": []}]),
    "broken text": wire().replace(b"float32", b"\xff\xfe\xfd\xfc\xfb\xfa\xf9"),
    "cut short": wire()[:-3],
    "more behind it": wire() + b"\x00",
}


@pytest.mark.parametrize("payload", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_hostile_bytes_are_no_manifest(payload: bytes) -> None:
    with pytest.raises(WeightError):
        WeightManifest.decode(payload)


def test_every_byte_of_a_manifest_may_be_another(owner: Owner) -> None:
    """Whatever one flipped bit makes of it: a manifest, or a refusal of the one kind that is caught."""
    payload = export(owner, 0).encode()
    refused = 0
    for position in range(len(payload)):
        changed = bytearray(payload)
        changed[position] ^= 0x81
        try:
            WeightManifest.decode(bytes(changed))
        except WeightError:
            refused += 1
    assert refused > len(payload) // 4


def test_nothing_of_the_weights_unpickles() -> None:
    (folder,) = beamline.weights.__path__
    sources = sorted(Path(folder).glob("*.py"))
    assert len(sources) > 10
    imported = {
        name.split(".")[0]
        for source in sources
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        for name in _names(node)
    }
    assert "msgspec" in imported
    assert imported & {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing", "torch"} == set()


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
