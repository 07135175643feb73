"""The settings of `rollout.environment`: what answers the policy between its turns."""

from beamline.protocol.section import Positive, PositiveFloat, Section, check_name

ENVIRONMENTS = ("calculator",)
"""Those that Beamline has; docs/environments.md describes them and how to write another."""


class EnvironmentSection(Section, kw_only=True):
    name: str = ""
    """calculator, or package.module:Class of your own; empty is one turn."""
    max_turns: Positive = 8
    """A trajectory that has not ended by then counts as cut off."""
    timeout_s: PositiveFloat = 10.0
    """Of one call. A trajectory whose environment takes longer has no reward."""
    workers: Positive = 1
    """Processes in which environments run, each of which can be killed."""
    memory_mib: Positive = 4096
    """Address space of one process."""

    def __post_init__(self) -> None:
        if self.name:
            check_name("name", self.name, ENVIRONMENTS)
