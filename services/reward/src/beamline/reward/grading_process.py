"""A process that grades and may be killed at any moment: a copy of its fork server, with the grader loaded.

Jobs come and verdicts leave on one socket. Its memory is limited, a grader that spins is ended by the kernel even if
nobody is left to kill it, and the process dies with its fork server.
"""

import socket

from beamline.reward.frames import MAX_TEXT_CHARS, Abstained, Outcome, encode_frame, read_job
from beamline.reward.grader import Grader, Verdict
from beamline.runtime.foreign_code import limit_cpu, limit_memory


def serve(jobs: socket.socket, grader: Grader, *, timeout_s: float, memory_bytes: int) -> None:
    """Grade until the socket is closed."""
    limit_memory(memory_bytes)
    with jobs.makefile("rb") as stream:
        while job := read_job(stream):
            for text in job.texts:
                limit_cpu(timeout_s)
                jobs.sendall(encode_frame(_grade(grader, text, job.ground_truth)))


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
