"""`python -m beamline.reward.read_truths GRADER`: which ground truths a grader can read, for the check of a data set.

A JSON list of ground truths comes on standard input; a list of the same length leaves on standard output: for each one
why the grader cannot read it, or an empty text. Each is read where it can be killed, like a response of a run.
"""

import asyncio
import json
import os
import sys

from beamline.protocol.errors import ConfigError
from beamline.protocol.reward_config import RewardSection
from beamline.reward.frames import Abstained, Outcome
from beamline.reward.pool import Graders

ANSWERS = ("math_dapo", "math_verify", "gsm8k", "exact")
"""Graders whose ground truth is an answer, which therefore has to be right when it is given as one."""
REFUSED = 2


def main() -> int:
    """2 for what the user has to mend, said in one line; any other failure is a traceback and 1."""
    (grader,) = sys.argv[1:]
    try:
        reasons = asyncio.run(read_all(grader, json.load(sys.stdin)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    json.dump(reasons, sys.stdout, ensure_ascii=False)
    return 0


async def read_all(grader: str, truths: list[str]) -> list[str]:
    """For each ground truth why it cannot be read, empty where it can.

    Raises:
        ConfigError: no such grader, or one that cannot be asked without a run's settings.
        BeamlineError: it could not be loaded in time.
    """
    try:
        settings = RewardSection(grader=grader, workers=len(os.sched_getaffinity(0)))
        settings.check_graders([grader])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    graders = Graders([grader], settings)
    await graders.start()
    try:
        outcomes = await asyncio.gather(*(graders.grade(grader, [f"Answer: {truth}"], truth) for truth in truths))
    finally:
        await graders.close()
    return [_why(grader, outcome) for (outcome,) in outcomes]


def _why(grader: str, outcome: Outcome) -> str:
    if isinstance(outcome, Abstained):
        return outcome.why.removeprefix("grader raised ValueError: ")
    if grader in ANSWERS and outcome.acc != 1.0:
        return f"{grader} finds it wrong when it is given as the answer"
    return ""


if __name__ == "__main__":
    sys.exit(main())
