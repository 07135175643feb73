"""One policy on its way through the rollout workers: who is waited for, who is asked again, who is left out. No I/O."""

from collections import Counter
from collections.abc import Callable

from beamline.coordinator.roster import HEARTBEAT_DEADLINE_S, Roster, Stage, Standing, WorkerKey
from beamline.protocol.messages import Heartbeat

WORDS = {Stage.PREPARED: "prepare", Stage.SERVED: "load"}


class Passage:
    """Questions to the roster about one policy, and the tries so far.

    Those that had started when it began are waited for. A process that starts meanwhile is welcome, but waited for only
    where nobody else can come through.

    Args:
        roster: collects the answers.
        policy_version: of the policy.
        max_tries: failures of a worker, preparing and loading together, before it is left out.
        attempt: of the fence that comes first.
        now: monotonic clock in seconds.
    """

    def __init__(
        self, roster: Roster, policy_version: int, *, max_tries: int, attempt: int, now: Callable[[], float]
    ) -> None:
        self.policy_version = policy_version
        self.attempt = attempt
        self._roster = roster
        self._max_tries = max_tries
        self._now = now
        self._expected = {worker.worker: worker.incarnation for worker in roster.started("rollout", now())}
        self._tries = Counter[str]()
        self._late: dict[WorkerKey, tuple[Standing, str]] = {}

    def awaited(self, goal: Stage) -> list[str]:
        """Workers that may still come to the goal and are waited for; empty when it is decided who has."""
        live = self._live()
        undecided = [worker for worker in live if not self._is_decided(worker, goal)]
        if self.reached(goal) or any(self._may_try_again(worker) for worker in live):
            return [worker.worker for worker in undecided if self._is_expected(worker)]
        return [worker.worker for worker in undecided] if live else ["a rollout worker that is alive"]

    def reached(self, goal: Stage) -> bool:
        """Whether a live worker has come to the goal."""
        return any(self._standing(worker).stage >= goal for worker in self._live())

    def retry(self) -> bool:
        """Count the failures of this attempt; True where somebody may try again, by a fence of the next one."""
        failed = [worker for worker in self._live() if self._has_failed(self._standing(worker))]
        again = any(self._may_try_again(worker) for worker in failed)
        self._tries.update(worker.worker for worker in failed)
        self.attempt += again
        return again

    def give_up(self, goal: Stage, deadline_s: float) -> None:
        """Wait no longer for those that have not answered; another answer makes up for it. Newcomers have more time."""
        for worker in self._live():
            if self._is_expected(worker) and not self._is_decided(worker, goal):
                reason = f"it did not {WORDS[goal]} it within weights.deadline_s={deadline_s:g}"
                self._late[_key(worker)] = (self._standing(worker), reason)

    def left_out(self) -> dict[str, str]:
        """Why workers do not serve the policy, by name."""
        live = {worker.worker: worker for worker in self._live()}
        reasons = {name: self._reason(live.get(name)) for name in sorted({*self._expected, *live})}
        return {name: reason for name, reason in reasons.items() if reason}

    def _reason(self, worker: Heartbeat | None) -> str:
        if worker is None:
            return f"nothing was heard of it for {HEARTBEAT_DEADLINE_S:g} s"
        standing = self._standing(worker)
        if standing.stage is Stage.SERVED:
            return ""
        late, reason = self._late.get(_key(worker), (None, ""))
        if late == standing:
            return reason
        return standing.error or "it was started meanwhile and loads it by itself"

    def _is_expected(self, worker: Heartbeat) -> bool:
        return self._expected.get(worker.worker) == worker.incarnation

    def _live(self) -> list[Heartbeat]:
        return self._roster.alive("rollout", self._now())

    def _standing(self, worker: Heartbeat) -> Standing:
        return self._roster.standing(worker, self.policy_version)

    def _is_decided(self, worker: Heartbeat, goal: Stage) -> bool:
        standing = self._standing(worker)
        late, _ = self._late.get(_key(worker), (None, ""))
        spent = bool(standing.error) and self._tries[worker.worker] >= self._max_tries
        return standing.stage >= goal or standing == late or self._has_failed(standing) or spent

    def _has_failed(self, standing: Standing) -> bool:
        """At the present attempt; one that failed before is being asked again."""
        return bool(standing.error) and standing.attempt >= self.attempt

    def _may_try_again(self, worker: Heartbeat) -> bool:
        return self._has_failed(self._standing(worker)) and self._tries[worker.worker] + 1 < self._max_tries


def _key(worker: Heartbeat) -> WorkerKey:
    return worker.worker, worker.incarnation
