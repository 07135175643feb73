"""Loads one grader and makes grading processes of it by fork: `python -m beamline.reward.fork_server`.

Loading a symbolic library takes seconds and a fork milliseconds, so a grading process that was killed costs next to
nothing. The service's requests come on standard input, a Unix socket of packets; a grader's own prints go to standard
error. The server dies with the service, and its grading processes with it.
"""

import argparse
import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable

import msgspec

from beamline.protocol.errors import ConfigError
from beamline.protocol.reward_config import RewardSection
from beamline.reward.fork_frames import (
    MAX_PACKET_BYTES,
    Ended,
    Fork,
    Forked,
    Kill,
    Loaded,
    Refused,
    decode_request,
    encode_packet,
)
from beamline.reward.grader import load_grader
from beamline.reward.grading_process import serve
from beamline.runtime.foreign_code import close_standard_streams, die_with


def main() -> int:
    """Serve until the service closes its end; 1 when the grader cannot be loaded."""
    arguments = _parse_arguments()
    die_with(arguments.parent)
    control = _take_control()
    settings = msgspec.json.decode(arguments.settings, type=RewardSection)
    try:
        grader = load_grader(arguments.grader, settings)
    except ConfigError as error:
        control.send(encode_packet(Refused(str(error))))
        return 1
    # What is there now stays shared: no collection of a child touches it.
    gc.collect()
    gc.freeze()
    control.send(encode_packet(Loaded()))

    def grade(jobs: socket.socket) -> None:
        serve(jobs, grader, timeout_s=settings.grade_timeout_s, memory_bytes=arguments.memory_bytes)

    _Children(control, grade).run()
    return 0


class _Children:
    """The grading processes of a server, each the leader of a session of its own.

    Args:
        control: packets of the service.
        work: what a child does with the socket that came with its Fork.
    """

    def __init__(self, control: socket.socket, work: Callable[[socket.socket], None]) -> None:
        self._control = control
        self._work = work
        self._descriptors: dict[int, int] = {}
        """Process descriptor of each child, by its id; readable once it has ended."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def run(self) -> None:
        """Do what the service asks and tell it who ended, until it closes its end."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.data)
                elif not self._serve_request():
                    return

    def _serve_request(self) -> bool:
        packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 1)
        if not packet:
            return False
        match decode_request(packet):
            case Fork():
                self._fork(socket.socket(fileno=descriptors[0]))
            case Kill(pid=pid) if pid in self._descriptors:
                _kill(pid)
            case Kill():
                pass  # it has ended by itself
        return True

    def _fork(self, jobs: socket.socket) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_child(parent, jobs)
        jobs.close()
        self._descriptors[pid] = os.pidfd_open(pid)
        self._selector.register(self._descriptors[pid], selectors.EVENT_READ, data=pid)
        self._control.send(encode_packet(Forked(pid)))

    def _run_child(self, parent: int, jobs: socket.socket) -> None:
        """Never returns: what the server does next is not for its child."""
        status = 1
        try:
            os.setsid()
            die_with(parent)
            self._selector.close()
            self._control.close()
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._work(jobs)
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:  # the child's last word; then it is gone
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _reap(self, pid: int) -> None:
        # What it started outlives it in its session, whose id is its own until it is waited for.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        descriptor = self._descriptors.pop(pid)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        self._control.send(encode_packet(Ended(pid, os.waitstatus_to_exitcode(status))))


def _kill(pid: int) -> None:
    """A child that is not the leader of its session yet has started nothing."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grader", required=True, help="a known name, or package.module:function")
    parser.add_argument("--settings", required=True, help="the configuration's section reward, as JSON")
    parser.add_argument("--memory-bytes", type=int, required=True, help="address space of each grading process")
    parser.add_argument("--parent", type=int, required=True, help="process id of the service")
    return parser.parse_args()


def _take_control() -> socket.socket:
    """The service's requests on a descriptor that the grader's code does not know of."""
    control = socket.socket(fileno=os.dup(0))
    close_standard_streams()
    return control


if __name__ == "__main__":
    sys.exit(main())
