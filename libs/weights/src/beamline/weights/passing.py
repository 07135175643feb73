"""Policies handed from process to process over a Unix socket; a connection is the reader's hold on what it was handed.

One question and one answer a connection, each a msgpack frame. Whoever connects must run as the owner's user. The
connection stays open while the reader uses the memory: a reader that dies lets go by dying.
"""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from beamline.protocol.errors import WeightError

REQUEST_DEADLINE_S = 5.0
"""For a peer to say what it wants."""
ATTACH_DEADLINE_S = 30.0
"""For the owner to answer."""
MAX_FRAME_BYTES = 4096
MAX_WHY = 1000
"""Characters of a refusal, which must fit a frame."""
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


_ANSWER: msgspec.msgpack.Decoder[Granted | Refused] = msgspec.msgpack.Decoder(Granted | Refused)


@dataclass(frozen=True)
class Hold:
    """A policy's memory that is read, until it is let go."""

    num_bytes: int
    release: Callable[[], None]
    descriptor: int | None = None
    """Handed to the reader, where the memory has one."""


class PassingServer:
    """Answers readers on a socket of the owner's, in threads of its own. Close it at the end.

    Args:
        path: of the socket; its folder is made with mode 0700 if missing.
        hold: gives the memory of a policy version, or raises WeightError.

    Raises WeightError: the socket cannot be made.
    """

    def __init__(self, path: Path, hold: Callable[[int], Hold]) -> None:
        self.path = path
        self._hold = hold
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._open: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            self._socket.bind(str(path))
            path.chmod(0o600)
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise WeightError(f"cannot listen at {path}: {error.strerror or error}") from error
        self._thread = threading.Thread(target=self._accept, name="weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more, and hang up on those that still read. A second call does nothing."""
        if self._socket.fileno() < 0:
            return
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        with self._lock:
            still_open = dict(self._open)
            for connection in still_open:
                connection.shutdown(socket.SHUT_RDWR)
        for thread in still_open.values():
            thread.join()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except ConnectionError:
                continue  # the peer has gone again
            except OSError:
                return  # closed
            thread = threading.Thread(target=self._serve, args=(connection,), name="weights-reader", daemon=True)
            with self._lock:
                self._open[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._answer(connection)
        except OSError:
            pass  # a peer that breaks off is no event: its hold is released either way
        finally:
            with self._lock:
                del self._open[connection]
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        peer = _peer_user(connection)
        if peer != os.geteuid():
            _refuse(connection, f"user {peer} may not read the weights of user {os.geteuid()}")
            return
        connection.settimeout(REQUEST_DEADLINE_S)
        try:
            hold = self._hold(_read(connection, Attach).policy_version)
        except TimeoutError:
            _refuse(connection, "no request came in time")
            return
        except (WeightError, EOFError) as error:
            _refuse(connection, str(error))
            return
        try:
            descriptors = [] if hold.descriptor is None else [hold.descriptor]
            socket.send_fds(connection, [_frame(Granted(hold.num_bytes))], descriptors)
            connection.settimeout(None)
            while connection.recv(64):
                pass
        finally:
            hold.release()


def _refuse(connection: socket.socket, why: str) -> None:
    connection.sendall(_frame(Refused(why[:MAX_WHY])))


class Handed:
    """A reader's hold on a policy's memory. Close it to let go; the descriptor is the caller's.

    Args:
        path: of the owner's socket.
        policy_version: the policy that is wanted.
        has_descriptor: whether the memory is handed over; if not, it is reached in another way.

    Raises WeightError: no owner at the path, or it refuses.
    """

    def __init__(self, path: Path, policy_version: int, has_descriptor: bool = True) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._what = f"policy {policy_version}: {path}"
        try:
            self._socket.settimeout(ATTACH_DEADLINE_S)
            self._socket.connect(str(path))
            with contextlib.suppress(ConnectionError):  # it may have refused before it was asked
                self._socket.sendall(_frame(Attach(policy_version)))
            self.descriptor = self._receive(int(has_descriptor))
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

    def _receive(self, num_descriptors: int) -> int:
        """The descriptor that was handed over, or -1."""
        flags = socket.MSG_CMSG_CLOEXEC
        payload, descriptors, _, _ = socket.recv_fds(self._socket, MAX_FRAME_BYTES, num_descriptors, flags)
        if not payload:
            raise WeightError(f"{self._what} hung up without an answer: the process that owns the weights has ended")
        try:
            answer = _decode(payload, _ANSWER)
        except (WeightError, EOFError) as error:
            _close_all(descriptors)
            raise WeightError(f"{self._what} gave no answer ({error})") from error
        if isinstance(answer, Refused):
            _close_all(descriptors)
            raise WeightError(f"{self._what} refuses its weights: {answer.why}")
        if len(descriptors) < num_descriptors:
            raise WeightError(f"{self._what} refuses its weights: no memory came with the answer")
        return descriptors[0] if descriptors else -1


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
    return _decode(header + _exactly(connection, length), msgspec.msgpack.Decoder(kind))


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        part = connection.recv(num_bytes - len(found))
        if not part:
            raise EOFError("the peer hung up")
        found += part
    return found


def _decode[T](frame: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    if len(frame) < _LENGTH.size or _LENGTH.unpack_from(frame)[0] != len(frame) - _LENGTH.size:
        raise EOFError(f"{len(frame)} bytes are not a frame")
    try:
        return decoder.decode(frame[_LENGTH.size :])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WeightError(f"not a request for weights: {error}") from error
