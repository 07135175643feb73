"""What the main loop waits for, as questions to the state, and what is missing in words."""

import time

from beamline.coordinator.core import Core
from beamline.protocol.messages import CheckpointSaved, PolicyUpdate


class Readiness:
    """Questions that change nothing."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def update(self, step: int) -> PolicyUpdate | None:
        """The trainer's update of the step or of a later one."""
        update = self._core.update
        return update if update and update.step >= step else None

    def saved(self) -> CheckpointSaved | None:
        """The last step's checkpoint, once it is complete."""
        saved = self._core.state.saved
        return saved if saved and saved.step == self._core.ledger.step else None

    def missing_groups(self) -> str:
        """What a batch still lacks."""
        ledger, need = self._core.ledger, self._core.config.rollout.sampling.groups_per_step
        return f"{need - ledger.num_fresh()} of {need} groups of step {ledger.step + 1} from rollout and reward"

    def missing_services(self) -> str:
        """What a start still lacks; empty when everyone is there."""
        roster, now, step = self._core.roster, time.monotonic(), self._core.ledger.step
        replicas = self._core.config.rollout.replicas
        missing = [f"a heartbeat of {name}" for name in ("reward", "trainer") if not roster.alive(name, now)]
        if self.update(step) is None:
            missing.append("the trainer's first policy" if step == 0 else f"policy {step} of the trainer")
        started = [worker.worker for worker in roster.started("rollout", now)]
        if len(started) < replicas:
            missing.append(f"{replicas} rollout workers to start (now {started})")
        return ", ".join(missing)
