"""Who is alive and what they serve: a pure state machine over heartbeats and PolicyLoaded messages."""

from beamline.protocol.messages import Heartbeat, LeaseReport, PolicyLoaded

HEARTBEAT_DEADLINE_S = 15.0
"""A worker that was silent for longer is not waited for; it rejoins by its next heartbeat."""


class Roster:
    """The workers of a run, by name; a new incarnation replaces the old one."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, Heartbeat]] = {}
        self._served: dict[tuple[str, str], int] = {}
        self._released: dict[tuple[str, str], int] = {}
        self._freed_bytes: dict[str, int] = {}
        self._refusals: dict[tuple[str, str], PolicyLoaded] = {}
        self.canary_gaps: dict[str, float] = {}

    def record_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Note a sign of life; `now` in seconds of a monotonic clock."""
        self._last[heartbeat.worker] = (now, heartbeat)

    def record_loaded(self, loaded: PolicyLoaded) -> None:
        key = (loaded.worker, loaded.incarnation)
        if loaded.error:
            self._refusals[key] = loaded
            return
        self._refusals.pop(key, None)
        self.canary_gaps[loaded.worker] = loaded.canary_gap
        self._served[key] = max(self._served.get(key, -1), loaded.policy_version)

    def record_release(self, report: LeaseReport) -> None:
        key = (report.worker, report.incarnation)
        self._released[key] = max(self._released.get(key, -1), report.sequence)
        self._freed_bytes[report.worker] = report.freed_bytes

    def alive(self, service: str, now: float) -> list[Heartbeat]:
        """The service's workers that were heard of within HEARTBEAT_DEADLINE_S."""
        return [
            heartbeat
            for at, heartbeat in self._last.values()
            if heartbeat.service == service and now - at <= HEARTBEAT_DEADLINE_S
        ]

    def workers(self) -> list[Heartbeat]:
        """The last heartbeat of every worker, by name."""
        return [heartbeat for _, (_, heartbeat) in sorted(self._last.items())]

    def served_version(self, heartbeat: Heartbeat) -> int:
        """Policy version that this incarnation serves, by its report or its heartbeat; -1 before the first."""
        reported = self._served.get((heartbeat.worker, heartbeat.incarnation), -1)
        return max(reported, heartbeat.policy_version)

    def loaded_everywhere(self, policy_version: int, now: float, at_least: int = 1) -> bool:
        """Whether every live rollout worker, and at least so many, serve the version or a newer one.

        Nobody waits for a worker that refused the version, as long as another serves it.
        """
        workers = self.alive("rollout", now)
        willing = [worker for worker in workers if worker.worker not in self.refusals(policy_version)]
        served = [self.served_version(worker) >= policy_version for worker in willing]
        return len(workers) >= at_least and len(served) > 0 and all(served)

    def refusals(self, policy_version: int) -> dict[str, str]:
        """Why workers do not serve this version, by name."""
        return {
            worker: loaded.error
            for (worker, incarnation), loaded in self._refusals.items()
            if loaded.policy_version == policy_version and self._incarnation(worker) == incarnation
        }

    def _incarnation(self, worker: str) -> str:
        return self._last[worker][1].incarnation if worker in self._last else ""

    def released(self, service: str, sequence: int, now: float) -> bool:
        """Whether every live worker of the service reported its release for that phase."""
        return all(
            self._released.get((worker.worker, worker.incarnation), -1) >= sequence
            for worker in self.alive(service, now)
        )

    def freed_bytes(self) -> dict[str, int]:
        """Bytes that each worker measured as freed at its last release."""
        return dict(self._freed_bytes)
