"""Graders that misbehave as the response's text tells them to. Grading processes import them by path."""

import os
import signal
import time
from pathlib import Path

from beamline.reward import math_dapo
from beamline.reward.grader import Verdict


def by_text(text: str, ground_truth: str) -> Verdict:
    """Grades as math_dapo unless the text asks for trouble."""
    match text:
        case "hang":
            time.sleep(3600)
        case "spin":
            while True:
                pass
        case "crash":
            os.abort()
        case "exit":
            os._exit(7)
        case "raise":
            raise LookupError("planted")
        case "memory":
            bytearray(3 << 30)
        case "print":
            print("\x00\x00\x00\x05hello on standard output", flush=True)
        case "nan":
            return Verdict(reward=float("nan"), acc=1.0)
        case "text":
            return Verdict(reward="1", acc=1.0)  # type: ignore[arg-type]
        case "share":
            return Verdict(reward=1.0, acc=2.0)
        case "number":
            return Verdict(reward=1, acc=True, pred=5)  # type: ignore[arg-type]
        case "none":
            return None  # type: ignore[return-value]
        case "server":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(3600)
        case "float":
            return 1.0  # type: ignore[return-value]
        case "long":
            return Verdict(reward=1.0, acc=1.0, pred="x" * 1_000_000)
        case "child":
            child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "3600")
            Path(ground_truth).write_text(str(child))
            time.sleep(3600)
        case "pid":
            return Verdict(reward=1.0, acc=1.0, pred=str(os.getpid()))
        case _:
            pass
    return math_dapo.grade(text, ground_truth)
