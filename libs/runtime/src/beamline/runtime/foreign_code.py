"""What a process does before it runs code that is not ours, and the frames by which it is talked to.

Its memory is limited, code that spins is ended by the kernel even if nobody is left to kill it, the process dies with
the one that started it, and the code's own prints go to standard error.
"""

import argparse
import ctypes
import math
import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

HEADER = struct.Struct(">I")
"""Length of a frame, before it."""

_PR_SET_PDEATHSIG = 1
_CPU_SLACK_S = 1
"""The parent kills after the time limit; the kernel's limit comes later and only matters when the parent is gone."""


def frame(payload: bytes) -> bytes:
    """A payload with its length before it."""
    return HEADER.pack(len(payload)) + payload


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next payload of a blocking stream; None at its end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return stream.read(HEADER.unpack(header)[0])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments with which `KillableProcess.start` starts every process."""
    parser.add_argument("--memory-bytes", type=int, required=True, help="limit of the address space")
    parser.add_argument("--parent", type=int, required=True, help="process id of who started this")


def confine(parent: int, memory_bytes: int) -> tuple[BinaryIO, BinaryIO]:
    """Tie this process to its parent and limit it; returns the streams of frames to read and to write.

    They are on descriptors that foreign code does not know of.
    """
    die_with(parent)
    limit_memory(memory_bytes)
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    close_standard_streams()
    return incoming, outgoing


def die_with(parent: int) -> None:
    """Be killed when the parent ends; exit at once if it has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"process {parent} ended before its child had started")


def limit_memory(num_bytes: int) -> None:
    """Of the address space; no core is written either."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def close_standard_streams() -> None:
    """Nothing is read any more, and what the code prints goes to standard error."""
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)


def limit_cpu(more_s: float) -> None:
    """From here on, the process may use so many seconds of processor time and a little more."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime + more_s) + _CPU_SLACK_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def describe_status(status: int) -> str:
    """In words, how a process ended: its exit status, or minus the signal that ended it."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
