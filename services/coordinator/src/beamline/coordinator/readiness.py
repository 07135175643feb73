"""What the main loop waits for, as questions to the state, and what is missing in words."""

import time

from beamline.coordinator.core import Core
from beamline.protocol.errors import BeamlineError
from beamline.protocol.messages import CheckpointSaved, PolicyUpdate


class Readiness:
    """Questions that change nothing."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def update(self, step: int) -> PolicyUpdate | None:
        """The trainer's update of the step or of a later one."""
        update = self._core.update
        return update if update and update.step >= step else None

    def loaded(self, policy_version: int) -> bool:
        """Whether the version is served everywhere. Raises BeamlineError when every worker refused it."""
        self._check_refusals(policy_version, at_least=1)
        return self._core.roster.loaded_everywhere(policy_version, time.monotonic())

    def saved(self) -> CheckpointSaved | None:
        """The last step's checkpoint, once it is complete."""
        saved = self._core.state.saved
        return saved if saved and saved.step == self._core.ledger.step else None

    def missing_groups(self) -> str:
        """What a batch still lacks."""
        ledger, need = self._core.ledger, self._core.config.rollout.sampling.groups_per_step
        return f"{need - ledger.num_fresh()} of {need} groups of step {ledger.step + 1} from rollout and reward"

    def missing_services(self) -> str:
        """What a start still lacks; empty when everyone is there. Raises BeamlineError as `loaded` does."""
        roster, now, version = self._core.roster, time.monotonic(), self._core.ledger.step
        replicas = self._core.config.rollout.replicas
        missing = [f"a heartbeat of {name}" for name in ("reward", "trainer") if not roster.alive(name, now)]
        if self._core.update is None:
            missing.append("the trainer's first policy")
        if not roster.loaded_everywhere(version, now, at_least=replicas):
            self._check_refusals(version, at_least=replicas)
            served = {worker.worker: roster.served_version(worker) for worker in roster.alive("rollout", now)}
            missing.append(f"{replicas} rollout workers with policy {version} (now {served})")
        return ", ".join(missing)

    def _check_refusals(self, policy_version: int, at_least: int) -> None:
        roster = self._core.roster
        names = [worker.worker for worker in roster.alive("rollout", time.monotonic())]
        refusals = roster.refusals(policy_version)
        if len(names) >= at_least and all(name in refusals for name in names):
            raise BeamlineError(f"no rollout worker could load policy {policy_version}: {refusals}")
