"""Segments handed from process to process over a Unix socket; a connection is the reader's hold on what it was handed.

One question and one answer a connection, each a msgpack frame. Whoever connects must run as the owner's user. The
connection stays open while the reader uses the memory: a reader that dies lets go by dying.
"""

import contextlib
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from beamline.protocol.errors import WeightError

REQUEST_DEADLINE_S = 5.0
"""For a peer to say what it wants."""
ATTACH_DEADLINE_S = 30.0
"""For the owner to answer."""
MAX_FRAME_BYTES = 4096
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a peer."""


class Attach(msgspec.Struct, frozen=True, tag="Attach/1", forbid_unknown_fields=True):
    """Reader to owner: hand me this policy's weights."""

    policy_version: int


class Granted(msgspec.Struct, frozen=True, tag="Granted/1", forbid_unknown_fields=True):
    """Owner to reader, with the descriptor beside it."""

    num_bytes: int


class Refused(msgspec.Struct, frozen=True, tag="Refused/1", forbid_unknown_fields=True):
    """Owner to reader: no."""

    why: str


class Hold(Protocol):
    """A segment that is read, until it is let go."""

    descriptor: int
    num_bytes: int

    def release(self) -> None: ...


class PassingServer:
    """Answers readers on a socket of the owner's, in threads of its own.

    Args:
        path: of the socket, in a folder that only the owner's user can enter.
        hold: gives the segment of a policy version, or raises WeightError.

    Raises WeightError: the socket cannot be made.
    """

    def __init__(self, path: Path, hold: Callable[[int], Hold]) -> None:
        self.path = path
        try:
            path.unlink(missing_ok=True)
            self._server = _Server(str(path), _Connection)
        except OSError as error:
            raise WeightError(f"cannot listen at {path}: {error.strerror or error}") from error
        path.chmod(0o600)
        self._server.hold = hold
        self._thread = threading.Thread(target=self._server.serve_forever, name="weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more, and hang up on those that still read."""
        self._server.shutdown()
        self._server.hang_up()
        self._server.server_close()
        self._thread.join()
        self.path.unlink(missing_ok=True)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    hold: Callable[[int], Hold]

    def __init__(self, path: str, handler: type[socketserver.BaseRequestHandler]) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(path, handler)

    def process_request(self, request: socket.socket, client_address: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._open.add(request)
        super().process_request(request, client_address)  # pyright: ignore[reportArgumentType]

    def shutdown_request(self, request: socket.socket) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A peer that breaks off is no event: its hold is released either way."""


class _Connection(socketserver.BaseRequestHandler):
    server: _Server
    request: socket.socket

    def handle(self) -> None:
        peer = _peer_user(self.request)
        if peer != os.geteuid():
            self._refuse(f"user {peer} may not read the weights of user {os.geteuid()}")
            return
        self.request.settimeout(REQUEST_DEADLINE_S)
        try:
            wanted = _read(self.request, Attach)
            hold = self.server.hold(wanted.policy_version)
        except (WeightError, TimeoutError, EOFError) as error:
            self._refuse(str(error) or "no request came in time")
            return
        try:
            granted = _frame(Granted(hold.num_bytes))
            socket.send_fds(self.request, [granted], [hold.descriptor])
            self.request.settimeout(None)
            while self.request.recv(64):
                pass
        finally:
            hold.release()

    def _refuse(self, why: str) -> None:
        with contextlib.suppress(OSError):
            self.request.sendall(_frame(Refused(why)))


class Handed:
    """A segment of another process. Close it to let go; the descriptor is the caller's.

    Raises WeightError: no owner at the path, or it refuses.
    """

    def __init__(self, path: Path, policy_version: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(ATTACH_DEADLINE_S)
            self._socket.connect(str(path))
            self._socket.sendall(_frame(Attach(policy_version)))
            self.num_bytes, self.descriptor = self._receive(path, policy_version)
            self._socket.settimeout(None)
        except OSError as error:
            self._socket.close()
            what = f"no answer within {ATTACH_DEADLINE_S:g} s" if isinstance(error, TimeoutError) else str(error)
            raise WeightError(f"policy {policy_version}: cannot get its weights from {path}: {what}") from error
        except WeightError:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def _receive(self, path: Path, policy_version: int) -> tuple[int, int]:
        payload, descriptors, _, _ = socket.recv_fds(self._socket, MAX_FRAME_BYTES, 1)
        try:
            answer = _decode(payload, Granted | Refused)
        except (WeightError, EOFError) as error:
            _close_all(descriptors)
            raise WeightError(f"policy {policy_version}: {path} gave no answer ({error})") from error
        if isinstance(answer, Refused) or not descriptors:
            _close_all(descriptors)
            why = answer.why if isinstance(answer, Refused) else "no memory came with the answer"
            raise WeightError(f"policy {policy_version}: {path} refuses its weights: {why}")
        return answer.num_bytes, descriptors[0]


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _peer_user(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1]


def _frame(message: msgspec.Struct) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def _read[T](connection: socket.socket, kind: type[T]) -> T:
    """Raises WeightError for what is not a frame of that kind, EOFError for a peer that hung up."""
    header = _exactly(connection, _LENGTH.size)
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise WeightError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES} are read")
    return _decode(header + _exactly(connection, length), kind)


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        part = connection.recv(num_bytes - len(found))
        if not part:
            raise EOFError("the peer hung up")
        found += part
    return found


def _decode[T](frame: bytes, kind: type[T]) -> T:
    if len(frame) < _LENGTH.size or _LENGTH.unpack_from(frame)[0] != len(frame) - _LENGTH.size:
        raise EOFError(f"{len(frame)} bytes are not a frame")
    try:
        return msgspec.msgpack.decode(frame[_LENGTH.size :], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WeightError(f"not a request for weights: {error}") from error
