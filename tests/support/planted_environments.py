"""Environments that misbehave as the policy's text tells them to. Hosts import them by path."""

import os
import time
from typing import Any, cast

from beamline.environments.calculator import Calculator
from beamline.environments.environment import EpisodeTask, Start, Step


class Planted:
    """Counts its turns: the answer to the third one is `3`. Begins with the prompt's ground truth."""

    def __init__(self) -> None:
        self.num_turns = 0

    def reset(self, task: EpisodeTask) -> Start:
        if task.ground_truth == "raise":
            raise LookupError("planted")
        return Start(observation=task.ground_truth, stop=["!"])

    def step(self, text: str) -> Step:
        self.num_turns += 1
        match text:
            case "raise":
                raise LookupError("planted")
            case "hang":
                time.sleep(3600)
            case "spin":
                while True:
                    pass
            case "crash":
                os.abort()
            case "exit":
                os._exit(7)
            case "memory":
                bytearray(3 << 30)
            case "print":
                print("\x00\x00\x00\x05hello on standard output", flush=True)
            case "none":
                return cast(Any, None)
            case "start":
                return cast(Any, Start())
            case "number":
                return Step(observation=cast(Any, 5))
            case "function":
                return Step(observation=cast(Any, len))
            case "nan":
                return Step(reward=float("nan"))
            case "long":
                return Step(observation="x" * 2_000_000)
            case "pid":
                return Step(observation=str(os.getpid()))
            case _:
                pass
        return Step(observation=str(self.num_turns), reward=0.5, done=text == "done")


class Forgetful(Planted):
    """Answers by the clock, which it must not."""

    def step(self, text: str) -> Step:
        super().step(text)
        return Step(observation=str(time.monotonic_ns()))


class Broken:
    """Cannot be made."""

    def __init__(self, argument: int) -> None:
        self.argument = argument


class Messages(Planted):
    """Answers as the user."""

    def reset(self, task: EpisodeTask) -> Start:
        return Start(role="user")


class Vowels(Planted):
    """Stops at every vowel, and answers with the number of the turn."""

    def reset(self, task: EpisodeTask) -> Start:
        return Start(stop=list("aeiou"))

    def step(self, text: str) -> Step:
        self.num_turns += 1
        return Step(observation=f" ({self.num_turns}) ", done=text[-1:] not in "aeiou")


class FragileCalculator(Calculator):
    """Breaks for an eighth of all samples, and takes its process down for one in fifty of the rest."""

    def __init__(self) -> None:
        self._seed = 0

    def reset(self, task: EpisodeTask) -> Start:
        self._seed = task.seed
        return super().reset(task)

    def step(self, text: str) -> Step:
        if self._seed % 8 == 0:
            raise LookupError("planted")
        if self._seed % 50 == 1:
            os.abort()
        return super().step(text)
