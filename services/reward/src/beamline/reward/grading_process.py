"""A process that grades and may be killed at any moment: a copy of its fork server, with the grader loaded.

Jobs come and verdicts leave on one socket. Its memory is limited, a grader that spins is ended by the kernel even if
nobody is left to kill it, and the process dies with its fork server.
"""

import ctypes
import math
import os
import resource
import signal
import socket
import sys

from beamline.reward.frames import MAX_TEXT_CHARS, Abstained, Outcome, encode_frame, read_job
from beamline.reward.grader import Grader, Verdict

_PR_SET_PDEATHSIG = 1
_CPU_SLACK_S = 1
"""The service kills after the time limit; the kernel's limit comes later and only matters when the service is gone."""


def serve(jobs: socket.socket, grader: Grader, *, timeout_s: float, memory_bytes: int) -> None:
    """Grade until the socket is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with jobs.makefile("rb") as stream:
        while job := read_job(stream):
            for text in job.texts:
                _limit_cpu(timeout_s)
                jobs.sendall(encode_frame(_grade(grader, text, job.ground_truth)))


def die_with(parent: int) -> None:
    """Be killed when the parent ends; exit at once if it has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"process {parent} ended before its child had started")


def _grade(grader: Grader, text: str, ground_truth: str) -> Outcome:
    try:
        verdict = grader(text, ground_truth)
        if not isinstance(verdict, Verdict):
            expected = f"{Verdict.__module__}.{Verdict.__name__}"
            return Abstained("error", f"grader returned {type(verdict).__name__}, expected {expected}")
        # Made again, of plain types: what a grader of a user's own puts in may be of any.
        pred, why = (str(part)[:MAX_TEXT_CHARS] for part in (verdict.pred, verdict.why))
        return Verdict(reward=float(verdict.reward), acc=float(verdict.acc), pred=pred, why=why)
    except MemoryError as error:
        return Abstained("memory", f"grader raised MemoryError: {error}"[:MAX_TEXT_CHARS])
    except Exception as error:  # a grader is foreign code: whatever it raises is its abstention
        return Abstained("error", f"grader raised {type(error).__name__}: {error}"[:MAX_TEXT_CHARS])


def _limit_cpu(timeout_s: float) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime + timeout_s) + _CPU_SLACK_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
