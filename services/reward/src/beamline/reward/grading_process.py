"""A process that grades and may be killed at any moment: `python -m beamline.reward.grading_process`.

Jobs come on standard input and verdicts leave on what was standard output; a grader's own prints go to standard error.
Its memory is limited, a grader that spins is ended by the kernel even if nobody is left to kill it, and the process
dies with the service that started it.
"""

import argparse
import ctypes
import math
import os
import resource
import signal
import sys
from typing import BinaryIO

import msgspec

from beamline.reward.frames import MAX_TEXT_CHARS, Abstained, Outcome, Ready, Refused, encode_frame, read_job
from beamline.reward.grader import Grader, Verdict, load_grader

_PR_SET_PDEATHSIG = 1
_CPU_SLACK_S = 1
"""The service kills after the time limit; the kernel's limit comes later and only matters when the service is gone."""


def main() -> int:
    """Serve jobs until standard input ends; 1 when the grader cannot be loaded."""
    arguments = _parse_arguments()
    _die_with(arguments.parent)
    jobs, replies = _take_streams()
    _limit_resources(arguments.memory_bytes)
    try:
        grader = load_grader(arguments.grader)
    except (ImportError, AttributeError) as error:
        replies.write(encode_frame(Refused(str(error))))
        return 1
    replies.write(encode_frame(Ready()))
    while job := read_job(jobs):
        for text in job.texts:
            _limit_cpu(arguments.timeout_s)
            replies.write(encode_frame(_grade(grader, text, job.ground_truth)))
    return 0


def _grade(grader: Grader, text: str, ground_truth: str) -> Outcome:
    try:
        verdict = grader(text, ground_truth)
    except Exception as error:  # a grader is foreign code: whatever it raises is its abstention
        return Abstained(f"grader raised {type(error).__name__}: {error}"[:MAX_TEXT_CHARS])
    if not isinstance(verdict, Verdict):
        return Abstained(f"grader returned {type(verdict).__name__}, expected beamline.reward.grader.Verdict")
    return msgspec.structs.replace(verdict, pred=verdict.pred[:MAX_TEXT_CHARS])


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grader", required=True, help="package.module:function")
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of the service")
    return parser.parse_args()


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the reward service ended before its grading process had started")


def _take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Jobs and replies on descriptors that the grader's code does not know of."""
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return jobs, replies


def _limit_resources(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu(timeout_s: float) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime + timeout_s) + _CPU_SLACK_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


if __name__ == "__main__":
    sys.exit(main())
