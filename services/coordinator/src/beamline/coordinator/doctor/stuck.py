"""Why a run stands still: from facts to findings, root cause first. No I/O.

A process that is stopped or gone, a broker that does not answer, a full store and a worker without heartbeats are each
a cause. A wait is one when it has used half of its time and nothing else explains it.
"""

import re
from collections.abc import Iterable, Iterator

import msgspec

from beamline.coordinator.doctor.stuck_facts import Facts, StoreFacts, WorkerFacts
from beamline.protocol.messages import PhaseName, StatusReply, Wait
from beamline.runtime.process_state import stop_in_words

LATE_S, SILENT_S = 4.0, 6.0
"""Two and three times the interval of heartbeats."""
START_S = 20.0
"""A process may take so long to its first heartbeat."""
OVERDUE_SHARE = 0.5
FULL_SHARE = 0.01
"""A store with less of its size free is full."""
MIB = 1 << 20

_NEEDS = re.compile(r"shared memory is full: blob \S+ needs (\d+) bytes")
_OUT_OF_STORE = re.compile(r"no space left|insufficient (?:storage )?resources|resource limits exceeded", re.IGNORECASE)
_GROUP = re.compile(r"\b(?:g-\d+|e\d+-[\d-]+)\b")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A cause, and what mends it."""

    cause: str
    """bus, store, stopped, ended, silent, overdue or folder."""
    about: str
    """A worker, nats-server, or a path."""
    text: str
    log: str = ""
    last_lines: list[str] = []


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """A wait of a worker."""

    worker: str
    what: str
    on: list[str]
    for_s: float
    within_s: float
    """0 for a wait that ends with the run."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What is found. `findings` is empty where the run moves."""

    run: str
    where: str
    """Step and phase, for how long, and what the coordinator waits for."""
    findings: list[Finding]
    """The root cause first."""
    waits: list[Edge]
    """The coordinator's first."""
    was_answered: bool = True
    """Whether the coordinator said where the run is."""

    @property
    def is_stuck(self) -> bool:
        return bool(self.findings)


def diagnose(facts: Facts) -> Diagnosis:
    """Find the causes."""
    findings = [*_of_bus(facts), *_of_stores(facts), *_of_processes(facts), *_of_silence(facts)]
    guilty = {finding.about for finding in findings}
    if "nats-server" not in guilty:
        findings += _of_waits(facts, guilty)
    findings += [
        Finding(cause="folder", about=name, text=f"{name} is gone from the run's folder: somebody has deleted it")
        for name in facts.missing
    ]
    waits = _edges(facts)
    return Diagnosis(
        run=facts.run,
        where=_where(facts, waits),
        findings=findings,
        waits=waits,
        was_answered=facts.status is not None,
    )


def _of_bus(facts: Facts) -> Iterator[Finding]:
    broker = facts.broker
    if broker is None:
        if facts.bus_error:
            yield Finding(cause="bus", about="nats-server", text=f"the bus does not answer: {facts.bus_error}")
        return
    evidence = {"about": "nats-server", "log": broker.log, "last_lines": broker.last_lines}
    if broker.stopped:
        stop = stop_in_words(broker.stopped[0], broker.pid or 0)
        yield Finding(cause="bus", text=f"nats-server passes nothing on: {stop}", **evidence)
    elif broker.has_ended:
        text = f"nats-server, process {broker.pid}, has ended; {_who_restarts(facts)}"
        yield Finding(cause="bus", text=text, **evidence)
    elif facts.bus_error:
        yield Finding(cause="bus", text=f"nats-server does not answer: {facts.bus_error}", **evidence)


def _of_stores(facts: Facts) -> Iterator[Finding]:
    """A full store, with the worker that could not write as its witness."""
    lines = [(worker, line) for worker in facts.workers for line in _said(worker, facts)]
    wanted = [(int(found[1]), worker) for worker, line in lines if (found := _NEEDS.search(line))]
    needed_bytes, witness = max(wanted, key=lambda pair: pair[0], default=(0, None))
    for store in facts.stores:
        is_short = store.holds == "blobs" and store.free_bytes < needed_bytes
        if is_short or store.free_bytes < FULL_SHARE * store.num_bytes:
            yield _full(store, needed_bytes, witness)
    broker = facts.broker
    refused = [line for line in broker.last_lines if _OUT_OF_STORE.search(line)] if broker is not None else []
    if broker is not None and refused:
        text = f"nats-server stores nothing more: {refused[-1]}: give its store more room"
        yield Finding(cause="store", about="nats-server", text=text, log=broker.log, last_lines=broker.last_lines)


def _full(store: StoreFacts, needed_bytes: int, witness: WorkerFacts | None) -> Finding:
    free = f"{store.free_bytes / MIB:.1f} of {store.num_bytes / MIB:.1f} MiB are free"
    need = f"; {witness.name} could not write a blob of {needed_bytes:,} bytes" if witness else ""
    mend = (
        "lower rollout.sampling.groups_per_step, or give it more room"
        if store.holds == "blobs"
        else "make room on that disk"
    )
    text = f"the store of {store.holds} is full: {free} in {store.path}{need}: {mend}"
    log, last_lines = (witness.log, witness.last_lines) if witness else ("", [])
    return Finding(cause="store", about=store.path, text=text, log=log, last_lines=last_lines)


def _of_processes(facts: Facts) -> list[Finding]:
    """Stopped ones before ended ones; those that the coordinator waits for before others."""
    awaited = _awaited(facts)
    workers = sorted(facts.workers, key=lambda worker: worker.name not in awaited)
    stopped = [_stopped(worker) for worker in workers if worker.stopped]
    ended = [
        _finding("ended", worker, f"{worker.name}'s process {worker.pid} has ended; {_who_restarts(facts)}")
        for worker in workers
        if worker.has_ended
    ]
    return stopped + ended


def _stopped(worker: WorkerFacts) -> Finding:
    held = worker.heartbeat.in_flight if worker.heartbeat else 0
    holds = f"; it held {held} groups" if held else ""
    text = f"{worker.name}{_silence(worker)}: {stop_in_words(worker.stopped[0], worker.pid or 0)}{holds}"
    return _finding("stopped", worker, text)


def _of_silence(facts: Facts) -> list[Finding]:
    """Workers whose processes run and that are not heard, though the bus is."""
    if facts.bus_error:
        return []
    return [
        _finding(
            "silent",
            worker,
            f"{worker.name}{_silence(worker)}: its process {process.pid} {process.words}, and its event loop does not "
            f"turn: `kill -USR1 {process.pid}` writes to its log where it is",
        )
        for worker in facts.workers
        if (process := worker.process) is not None and not worker.stopped and _is_silent(worker, process.age_s)
    ]


def _is_silent(worker: WorkerFacts, age_s: float) -> bool:
    if worker.silence_s is None:
        return age_s > START_S
    return min(worker.silence_s, age_s) > SILENT_S


def _of_waits(facts: Facts, guilty: set[str]) -> list[Finding]:
    """Waits that have used most of their time, the workers' own before those that they have on others."""
    known = {worker.name: worker for worker in facts.workers}
    overdue = [
        (worker, wait)
        for worker in facts.workers
        for wait in (worker.heartbeat.waits if worker.heartbeat else [])
        if _is_overdue(wait, facts.now) and not _is_explained(worker, wait, facts, guilty)
    ]
    overdue.sort(key=lambda pair: (bool(pair[1].on), pair[1].since))
    findings = list[Finding]()
    for worker, wait in overdue:
        culprit = known[_culprit(worker, wait, facts)]
        if not {culprit.name, worker.name} & {finding.about for finding in findings}:
            findings.append(_finding("overdue", culprit, _overdue_text(worker, wait, culprit, facts.now)))
    return findings


def _culprit(worker: WorkerFacts, wait: Wait, facts: Facts) -> str:
    """The one worker on which a wait is, by its name or because it has the groups that are awaited; else who waits."""
    holders = _holders(facts)
    having = {holders[group] for group in _GROUP.findall(wait.what) if group in holders}
    others = having or set(_workers_of(wait.on, facts.workers))
    return others.pop() if len(others) == 1 else worker.name


def _is_overdue(wait: Wait, now: float) -> bool:
    return wait.until > 0 and now - wait.since > OVERDUE_SHARE * (wait.until - wait.since)


def _is_explained(worker: WorkerFacts, wait: Wait, facts: Facts, guilty: set[str]) -> bool:
    """By a finding about the worker or about whom it waits for, or by the groups that go on coming in."""
    if worker.name in guilty or guilty & set(_workers_of(wait.on, facts.workers)):
        return True
    return facts.moved and worker.name == "coordinator"


def _overdue_text(worker: WorkerFacts, wait: Wait, culprit: WorkerFacts, now: float) -> str:
    spent = f"{now - wait.since:.0f} of at most {wait.until - wait.since:.0f} s"
    text = f"{worker.name} has waited {spent} for {wait.what}"
    if culprit is worker or culprit.heartbeat is None:
        return f"{text}, and gives up after that"
    own = [other.what for other in culprit.heartbeat.waits]
    does = f"waits for {', '.join(own[:2])}" if own else "waits for nothing"
    where = f"`kill -USR1 {culprit.pid}` writes to its log where it is" if culprit.pid else "its log may say more"
    return f"{text}; {culprit.name} is {culprit.heartbeat.state} and {does}: {where}"


def _finding(cause: str, worker: WorkerFacts, text: str) -> Finding:
    return Finding(cause=cause, about=worker.name, text=text, log=worker.log, last_lines=worker.last_lines)


def _silence(worker: WorkerFacts) -> str:
    if worker.silence_s is None:
        return " has never been heard" if worker.heartbeat is None else ""
    if worker.silence_s < LATE_S:
        return ""
    return f" has not sent a heartbeat for {worker.silence_s:.0f} s"


def _who_restarts(facts: Facts) -> str:
    launcher = facts.launcher
    if launcher is not None and launcher.stopped:
        return f"the launcher would start it again, but {stop_in_words(launcher.stopped[0], launcher.pid or 0)}"
    if launcher is not None and launcher.has_ended:
        return "nobody starts it again: the launcher has ended too"
    return "the launcher starts it again after a moment"


def _said(worker: WorkerFacts, facts: Facts) -> list[str]:
    """The last words of a worker, on the bus and in its log."""
    return [failed.error for failed in facts.failures if failed.worker == worker.name] + worker.last_lines


def _workers_of(names: Iterable[str], workers: Iterable[WorkerFacts]) -> list[str]:
    """Workers by their names or their services'."""
    wanted = set(names)
    return [worker.name for worker in workers if {worker.name, _service(worker)} & wanted]


def _service(worker: WorkerFacts) -> str:
    return worker.heartbeat.service if worker.heartbeat else re.sub(r"-\d+$", "", worker.name)


def _awaited(facts: Facts) -> set[str]:
    """The workers that the coordinator waits for."""
    coordinator = [worker.heartbeat for worker in facts.workers if worker.name == "coordinator" and worker.heartbeat]
    return set(_workers_of([name for beat in coordinator for wait in beat.waits for name in wait.on], facts.workers))


def _where(facts: Facts, waits: list[Edge]) -> str:
    status = facts.status
    if status is None:
        return facts.coordinator_error or "the coordinator could not be asked"
    paused = ", paused" if status.paused else ""
    since = f" for {facts.now - status.phase_since:.0f} s" if status.phase_since else ""
    awaited = [wait.what for wait in waits if wait.worker == "coordinator" and wait.within_s and wait.on]
    waiting = f", waits for {awaited[0]}" if awaited else ""
    return f"step {_step(status)} of {status.num_steps}, phase {status.phase}{since}{paused}{waiting}"


def _step(status: StatusReply) -> int:
    """The step under way; its policy is there already when that is taken to the workers, or saved."""
    has_policy = status.phase in (PhaseName.SYNC, PhaseName.CHECKPOINT, PhaseName.DONE)
    return status.step if has_policy else min(status.step + 1, status.num_steps)


def _holders(facts: Facts) -> dict[str, str]:
    """By group, the worker that is at it."""
    return {
        group: worker.name
        for worker in facts.workers
        if worker.name != "coordinator" and worker.heartbeat
        for wait in worker.heartbeat.waits
        for group in _GROUP.findall(wait.what)
    }


def _edges(facts: Facts) -> list[Edge]:
    """All waits, the coordinator's first and those with a limit first; a group that it waits for with who has it."""
    holders = _holders(facts)

    def place(found: re.Match[str]) -> str:
        return f"{found[0]} in {holders[found[0]]}" if found[0] in holders else found[0]

    edges = [
        Edge(
            worker=worker.name,
            what=_GROUP.sub(place, wait.what) if worker.name == "coordinator" else wait.what,
            on=wait.on,
            for_s=max(0.0, facts.now - wait.since),
            within_s=max(0.0, wait.until - wait.since),
        )
        for worker in facts.workers
        for wait in (worker.heartbeat.waits if worker.heartbeat else [])
    ]
    return sorted(edges, key=lambda edge: (edge.worker != "coordinator", edge.worker, not edge.within_s, -edge.for_s))
