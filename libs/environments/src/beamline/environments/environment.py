"""What a multi-turn environment is, and those that can be named.

An environment answers the policy between its turns. It is a class without arguments, one instance a trajectory, of
which a recipe names one of `ENVIRONMENTS` or any other as `package.module:Class`. It sees and gives text alone: the
tokens are kept by who calls it. Environments run in processes of their own (`beamline.environments.host_process`): one
may raise, hang, crash or eat memory, and only its trajectory ends by it.
"""

import math
from collections.abc import Mapping
from typing import Protocol

import msgspec


class EpisodeTask(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment is told of the trajectory that begins."""

    prompt_id: str
    data_source: str
    prompt: str
    """The rendered prompt, special tokens left out."""
    ground_truth: str
    seed: int
    """The sample's: for an environment that draws."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="Start"):
    """How a trajectory begins."""

    observation: str = ""
    """Follows the prompt as it is, before the policy's first turn."""
    stop: list[str] = []
    """Texts that end a turn; they stay in it. A turn always ends with an end token or at the length limit."""
    role: str = ""
    """Of the chat message that each later observation becomes, such as user or tool, with the chat template around it.
    Empty: it follows the policy's text as it is, as a tool's result inside the policy's own message does."""


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="Step"):
    """What becomes of a turn.

    Raises:
        ValueError: a reward that is not a finite number.
    """

    observation: str = ""
    """What the policy reads before its next turn; nobody reads that of a step that is done."""
    reward: float = 0.0
    """Of this turn. A trajectory's are summed, and added to what its grader gives."""
    done: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"reward={self.reward} must be finite")


class Environment(Protocol):
    """Deterministic: the same task and the same turns always give the same answers.

    What either method raises ends the trajectory, which then has no reward.
    """

    def reset(self, task: EpisodeTask) -> Start:
        """Begin. Called once, first."""
        ...

    def step(self, text: str) -> Step:
        """Answer one turn of the policy, whose text ends with a stop text unless the policy ended by itself.

        A turn that the length limit cut off is not answered.
        """
        ...


ENVIRONMENTS: Mapping[str, str] = {"calculator": "beamline.environments.calculator:Calculator"}


def import_path(name: str) -> str:
    """Where an environment is imported from."""
    return ENVIRONMENTS.get(name, name)
