"""Where the prompt groups of a run are on their way through the ring, from the services' live values."""

from collections.abc import Iterator

import msgspec

from beamline.coordinator.observe.view import RunView
from beamline.protocol.messages import PhaseName

ENDS = ("trained", "filtered", "stale", "failed")


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """How much there is at one place of the ring. What no service has told is left out of the ring, never zero."""

    name: str
    num: float
    total: float
    """Of a full bar; 0 where there is no bound."""
    unit: str = "groups"
    queued: float | None = None
    """Messages that wait in front of it; None where that was not told."""

    @property
    def share(self) -> float:
        """Of the bar, from 0 to 1."""
        return min(1.0, self.num / self.total) if self.total > 0 else 0.0


def stages(view: RunView) -> Iterator[Stage]:
    """The ring in the order in which a group goes through it."""
    open_groups, needed = ledger_count(view, "in_flight"), _one(view, "progress/needed_groups") or 0.0
    bound = max(needed, open_groups or 0.0)
    if (issued := ledger_count(view, "issued")) is not None:
        yield Stage(name="issued", num=issued, total=0.0)
    sampling = _sum(view, "workers/in_flight/", service="rollout")
    if sampling is not None:
        yield Stage(name="sampling", num=sampling, total=bound, queued=_queued(view, "rollout"))
    scoring = _sum(view, "workers/in_flight/", service="reward")
    if scoring is not None:
        yield Stage(name="scoring", num=scoring, total=bound, queued=_queued(view, "reward"))
    if (scored := _one(view, "progress/scored_groups")) is not None and needed:
        yield Stage(name="scored", num=scored, total=needed)
    yield from _training(view)
    if (trained := ledger_count(view, "trained")) is not None:
        yield Stage(name="trained", num=trained, total=issued or 0.0)


def ledger_count(view: RunView, name: str) -> float | None:
    """Groups that were issued, are in flight, or have come to an end; None before anyone has told."""
    live = _one(view, f"ledger/{name}")
    return live if live is not None and not view.is_done else view.ledger.get(name)


def queue_depths(view: RunView) -> dict[str, float]:
    """Messages that no worker holds, by work queue."""
    prefix = "queue/pending/"
    return {
        name.removeprefix(prefix): value
        for values in view.gauges.values()
        for name, value in values.items()
        if name.startswith(prefix)
    }


def under_way(view: RunView, num_workers: int = 0) -> Stage | None:
    """What the run's phase is about, as far as it goes; None where nobody tells.

    Args:
        num_workers: of the whole run, where that is known.
    """
    match view.phase:
        case PhaseName.START:
            started = sum(seen.has_started for seen in view.workers.values())
            return Stage(name="started", num=started, total=num_workers, unit="workers") if num_workers else None
        case PhaseName.SYNC:
            rollouts = [w.heartbeat for w in view.workers.values() if w.heartbeat.service == "rollout"]
            serving = sum(worker.policy_version >= view.policy_version for worker in rollouts)
            return Stage(name="serving", num=serving, total=len(rollouts), unit="workers") if rollouts else None
        case PhaseName.TRAIN:
            return _of_phase("training", view, "progress/micro_batches")
        case PhaseName.GENERATE | PhaseName.EVALUATE:
            return _of_phase("scored", view, "progress/needed_groups")
        case _:
            return None


def _of_phase(name: str, view: RunView, gauge: str) -> Stage | None:
    """A stage whose gauge was told since the phase began: an older one is of the phase before."""
    began = view.phase_since or 0.0
    if not any(view.told[worker] >= began for worker in view.gauge(gauge)):
        return None
    return next((stage for stage in stages(view) if stage.name == name), None)


def _training(view: RunView) -> Iterator[Stage]:
    total = _one(view, "progress/micro_batches")
    if total:
        done = _one(view, "progress/micro_batches_done") or 0.0
        queued = _queued(view, "trainer")
        yield Stage(name="training", num=done, total=total, unit="micro-batches", queued=queued)


def _queued(view: RunView, queue: str) -> float | None:
    return queue_depths(view).get(queue)


def _one(view: RunView, name: str) -> float | None:
    """A live value that one worker tells."""
    return next(iter(view.gauge(name).values()), None)


def _sum(view: RunView, prefix: str, *, service: str) -> float | None:
    """A live value of each worker of a service; None when no worker has told it."""
    names = [name for name, seen in view.workers.items() if seen.heartbeat.service == service]
    told = [view.gauges[name][prefix + name] for name in names if prefix + name in view.gauges.get(name, {})]
    return sum(told) if told else None
