"""What the main loop waits for, as questions to the state, and what is missing in words."""

import time

from beamline.coordinator.core import Core
from beamline.coordinator.numbers import OWN_STEPS
from beamline.protocol.messages import PolicyUpdate

MAX_NAMED = 4
"""Groups that are named one by one."""


class Readiness:
    """Questions that change nothing."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def update(self, step: int) -> PolicyUpdate | None:
        """The trainer's update of the step or of a later one."""
        update = self._core.update
        return update if update and update.step >= step else None

    def missing_numbers(self) -> str:
        """Which live workers have yet to tell what they did in the last step; empty when all have."""
        roster, now = self._core.roster, time.monotonic()
        alive = [heartbeat.worker for service in OWN_STEPS for heartbeat in roster.alive(service, now)]
        return ", ".join(worker for worker in alive if roster.owes(worker, self._core.ledger.step))

    def missing_groups(self) -> str:
        """What a batch still lacks, with the names of the oldest groups that nobody has answered."""
        ledger, need = self._core.ledger, self._core.config.rollout.sampling.groups_per_step
        names = sorted(prompt.group_id for prompt in ledger.unanswered())
        shown = f" ({_some(names)})" if names else ""
        return f"{need - ledger.num_fresh()} of {need} groups of step {ledger.step + 1}{shown} from rollout and reward"

    def missing_services(self) -> str:
        """What a start still lacks; empty when everyone is there."""
        return ", ".join(text for _, text in self._missing())

    def missing_names(self) -> list[str]:
        """The services that `missing_services` waits for."""
        return sorted({service for service, _ in self._missing()})

    def _missing(self) -> list[tuple[str, str]]:
        """By service, what is missing of it."""
        roster, now, step = self._core.roster, time.monotonic(), self._core.ledger.step
        replicas = self._core.config.rollout.replicas
        missing = [(name, f"a heartbeat of {name}") for name in ("reward", "trainer") if not roster.alive(name, now)]
        if self.update(step) is None:
            policy = "the trainer's first policy" if step == 0 else f"policy {step} of the trainer"
            missing.append(("trainer", policy))
        started = [worker.worker for worker in roster.started("rollout", now)]
        if len(started) < replicas:
            missing.append(("rollout", f"{replicas} rollout workers to start (now {started})"))
        return missing


def _some(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
