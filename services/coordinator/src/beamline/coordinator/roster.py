"""Who is alive, what they serve and what they hold: a pure state machine over heartbeats and the workers' reports."""

from enum import IntEnum

import msgspec

from beamline.protocol.messages import (
    Heartbeat,
    LeaseReport,
    Message,
    Metrics,
    PolicyLoaded,
    PolicyPrepared,
    WorkerState,
)

HEARTBEAT_DEADLINE_S = 15.0
"""A worker that was silent for longer is not waited for; it rejoins by its next heartbeat."""


class Stage(IntEnum):
    """How far a worker has come with a policy."""

    NONE = 0
    PREPARED = 1
    SERVED = 2


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker stands to one policy, by its last answer about it."""

    stage: Stage
    attempt: int = 0
    """Of that answer; 0 without one."""
    error: str = ""
    """Why it has come no further; the stage is then NONE."""


type WorkerKey = tuple[str, str]
"""Name and incarnation: what one process said is not true of the next."""


class Roster:
    """The workers of a run, by name; a new incarnation replaces the old one."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, Heartbeat]] = {}
        self._served: dict[WorkerKey, int] = {}
        self._prepared: dict[WorkerKey, PolicyPrepared] = {}
        self._loaded: dict[WorkerKey, PolicyLoaded] = {}
        self._left_out: dict[str, tuple[int, str]] = {}
        self._releases: dict[WorkerKey, LeaseReport] = {}
        self._canary_gaps: dict[str, float] = {}
        self._told: dict[str, int] = {}
        """Newest step of which a worker has told its numbers; -1 for live ones alone."""

    def record_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Note a sign of life; `now` in seconds of a monotonic clock."""
        self._last[heartbeat.worker] = (now, heartbeat)

    def record_prepared(self, prepared: PolicyPrepared) -> None:
        """Only the newest answer of a process counts, whatever order they come in."""
        key = (prepared.worker, prepared.incarnation)
        self._prepared[key] = max(prepared, self._prepared.get(key, prepared), key=_order)

    def record_loaded(self, loaded: PolicyLoaded) -> None:
        """As `record_prepared`."""
        key = (loaded.worker, loaded.incarnation)
        self._loaded[key] = max(loaded, self._loaded.get(key, loaded), key=_order)
        if not loaded.error:
            self._canary_gaps[loaded.worker] = loaded.canary_gap
            self._served[key] = max(self._served.get(key, -1), loaded.policy_version)

    def record_release(self, report: LeaseReport) -> None:
        key = (report.worker, report.incarnation)
        known = self._releases.get(key)
        if known is None or report.sequence >= known.sequence:
            self._releases[key] = report

    def record_told(self, message: Message) -> None:
        """A worker's own numbers, of a step or live."""
        if isinstance(message, Metrics):
            self._told[message.worker] = max(message.step, self._told.get(message.worker, -1))

    def owes(self, worker: str, step: int) -> bool:
        """Whether a worker that tells numbers has yet to tell those of a step."""
        return self._told.get(worker, step) < step

    def alive(self, service: str, now: float) -> list[Heartbeat]:
        """The service's workers that were heard of within HEARTBEAT_DEADLINE_S."""
        return [
            heartbeat
            for at, heartbeat in self._last.values()
            if heartbeat.service == service and now - at <= HEARTBEAT_DEADLINE_S
        ]

    def heard(self) -> dict[str, float]:
        """When each worker was last heard of, by the clock of `record_heartbeat`."""
        return {worker: at for worker, (at, _) in self._last.items()}

    def workers(self) -> list[Heartbeat]:
        """The last heartbeat of every worker, by name."""
        return [heartbeat for _, (_, heartbeat) in sorted(self._last.items())]

    def silences_s(self, now: float) -> dict[str, float]:
        """Seconds since the last heartbeat of every worker."""
        return {worker: now - at for worker, (at, _) in sorted(self._last.items())}

    def started(self, service: str, now: float) -> list[Heartbeat]:
        """The live workers that are past their start: by their heartbeat's state, or because they have answered."""
        answered = self._prepared.keys() | self._loaded.keys()
        return [
            worker
            for worker in self.alive(service, now)
            if worker.state is not WorkerState.STARTING or (worker.worker, worker.incarnation) in answered
        ]

    def served_version(self, heartbeat: Heartbeat) -> int:
        """Policy version that this incarnation serves, by its report or its heartbeat; -1 before the first."""
        reported = self._served.get((heartbeat.worker, heartbeat.incarnation), -1)
        return max(reported, heartbeat.policy_version)

    def standing(self, heartbeat: Heartbeat, policy_version: int) -> Standing:
        """How this incarnation stands to a policy. Of two answers to one attempt the later step counts."""
        if self.served_version(heartbeat) >= policy_version:
            return Standing(stage=Stage.SERVED)
        key = (heartbeat.worker, heartbeat.incarnation)
        answers = [answers[key] for answers in (self._loaded, self._prepared) if key in answers]
        about = [answer for answer in answers if answer.policy_version == policy_version]
        if not about:
            return Standing(stage=Stage.NONE)
        newest = max(about, key=lambda answer: answer.attempt)
        stage = Stage.NONE if newest.error else Stage.PREPARED
        return Standing(stage=stage, attempt=newest.attempt, error=newest.error)

    def leave_out(self, worker: str, policy_version: int, reason: str) -> None:
        """The run goes on without this worker, until it serves that policy or a later one."""
        self._left_out[worker] = (policy_version, reason)

    def left_out(self) -> dict[str, str]:
        """Why workers are left out at present, by name."""
        return {
            worker: f"left out of policy {version}: {reason}"
            for worker, (version, reason) in sorted(self._left_out.items())
            if worker not in self._last or self.served_version(self._last[worker][1]) < version
        }

    def release_of(self, worker: Heartbeat, sequence: int) -> LeaseReport | None:
        """What this incarnation reported when it released its memory for the phase of that sequence, or a later one."""
        report = self._releases.get((worker.worker, worker.incarnation))
        return report if report is not None and report.sequence >= sequence else None

    def sync_values(self, policy_version: int) -> dict[str, float]:
        """`sync/*` of a policy that has gone through the fence."""
        prepared = [p for p in self._prepared.values() if p.policy_version == policy_version and not p.error]
        loaded = [answer for answer in self._loaded.values() if answer.policy_version == policy_version]
        return {
            **{f"sync/canary_gap/{worker}": gap for worker, gap in self._canary_gaps.items()},
            **{f"sync/prepare_s/{answer.worker}": answer.prepare_s for answer in prepared},
            **{f"sync/load_s/{answer.worker}": answer.load_s for answer in loaded if not answer.error},
            "sync/num_bytes": float(sum(answer.num_bytes for answer in prepared)),
            "sync/left_out": float(len(self.left_out())),
        }

    def memory_values(self) -> dict[str, float]:
        """`resources/*`: what each worker holds, and measured as freed at its last release."""
        freed = {f"resources/freed_bytes/{r.worker}": float(r.freed_bytes) for r in self._releases.values()}
        return freed | {f"resources/rss_bytes/{w.worker}": float(w.rss_bytes) for w in self.workers()}


def _order(answer: PolicyPrepared | PolicyLoaded) -> tuple[int, int]:
    return answer.policy_version, answer.attempt
