"""The ledger: every issued group ends in exactly one state, whatever is delivered twice or out of order.

    issue -> issued -> scored -> batched -> trained
               |          |         `-----> failed (the trainer could not read its blobs)
               |          `-> filtered | stale
               `-> failed

A pure state machine: methods are synchronous, total and idempotent, and answer what there is to do. At every moment
`issued = trained + filtered + stale + failed + in_flight`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import StrEnum

import msgspec

from beamline.protocol.messages import GroupFailed, PromptGroup, ScoredGroup


class End(StrEnum):
    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be decided for a step: its groups, in the order in which they were issued, and those too old for it.

    The groups are a batch, or useless ones that end before the batch is full.
    """

    step: int
    groups: list[ScoredGroup]
    stale: list[str]


class _Open(msgspec.Struct):
    """A group that has not ended."""

    prompt: PromptGroup
    scored: ScoredGroup | None = None
    step: int | None = None


class Ledger:
    """Counts and states of all groups of a run.

    Args:
        groups_per_step: groups that a batch takes.
        max_staleness: policy versions by which a group may lag behind the policy that it trains.
        num_steps: after this many batches nothing is admitted.
        max_attempts: tries of a group.
        max_replaced: so many groups of a step may end as useless before its batch is full, and make room for others.
        is_useless: whether nothing can be learned from a group; asked where `max_replaced` is not 0.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        num_steps: int,
        max_attempts: int,
        max_replaced: int = 0,
        is_useless: Callable[[ScoredGroup], bool] = lambda group: False,
    ) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._num_steps = num_steps
        self._max_attempts = max_attempts
        self._max_replaced = max_replaced
        self._is_useless = is_useless
        self._open: dict[str, _Open] = {}
        self._ended: dict[str, End] = {}
        self._ends: dict[End, int] = dict.fromkeys(End, 0)
        self._unloaded: dict[int, int] = {}
        self._drawn = (0, 0, 0)
        """Step, groups kept for it, groups filtered."""
        self.step = 0
        """Newest step whose policy update is recorded; also the newest policy version."""
        self.loaded_version = -1
        """Policy version that every live worker serves."""

    def restore(self, step: int, ends: Mapping[End, int], prompts: Iterable[PromptGroup]) -> None:
        """Begin where an earlier ledger stood after a step: its counts, and its open groups, none of them answered.

        Groups that ended there are counted, and otherwise unknown. Does nothing once the ledger has got so far itself.
        """
        if self.step >= step:
            return
        self.step = step
        self._ends = {end: ends.get(end, 0) for end in End}
        for prompt in prompts:
            self.issue(prompt)

    @property
    def pending_step(self) -> int | None:
        """The step that is batched and not yet trained."""
        return next((group.step for group in self._open.values() if group.step is not None), None)

    def room(self) -> int:
        """Groups that may be admitted now: bounded by staleness, and by what the remaining steps can use.

        Groups in flight, and groups of a batch whose policy is not yet loaded everywhere, count against
        `(max_staleness + 1) * groups_per_step`.
        """
        capacity = (self._max_staleness + 1) * self._groups_per_step
        waiting = sum(group.step is None for group in self._open.values())
        batched_steps = self.pending_step or self.step
        usable = (self._num_steps - batched_steps) * self._groups_per_step
        occupied = len(self._open) + sum(self._unloaded.values())
        return max(0, min(capacity - occupied, usable - waiting))

    def issue(self, prompt: PromptGroup) -> None:
        """Open a group, or replace its prompt by a later attempt's."""
        if prompt.group_id in self._ended:
            return
        group = self._open.get(prompt.group_id)
        if group is None:
            self._open[prompt.group_id] = _Open(prompt)
        elif group.scored is None and prompt.attempt > group.prompt.attempt:
            group.prompt = prompt

    def awaits(self, group_id: str) -> bool:
        """Whether the group's grades would be taken."""
        group = self._open.get(group_id)
        return group is not None and group.scored is None

    def open_groups(self) -> list[str]:
        """Groups in flight."""
        return list(self._open)

    def open_prompts(self) -> list[PromptGroup]:
        """Their newest attempts, oldest group first."""
        return [group.prompt for group in self._open.values()]

    def num_fresh(self) -> int:
        """Scored groups that wait for a batch, stale ones included."""
        return sum(group.scored is not None and group.step is None for group in self._open.values())

    def record_scored(self, scored: ScoredGroup) -> bool:
        """Take a group's grades. False when it is not awaited: unknown, answered before, or ended."""
        group = self._open.get(scored.group_id)
        if group is None or group.scored is not None:
            return False
        group.scored = scored
        return True

    def record_failed(self, failed: GroupFailed) -> PromptGroup | None:
        """Take a failed attempt. Returns the next attempt to issue; None when the group ended or the news is old."""
        group = self._open.get(failed.group_id)
        if group is None or group.scored is not None or failed.attempt < group.prompt.attempt:
            return None
        if failed.retryable and failed.attempt + 1 < self._max_attempts:
            return msgspec.structs.replace(group.prompt, attempt=failed.attempt + 1)
        self._end(failed.group_id, End.FAILED)
        return None

    def unanswered(self) -> list[PromptGroup]:
        """Attempts that are out, oldest group first."""
        return [group.prompt for group in self._open.values() if group.scored is None]

    def overdue(self, now: float) -> list[PromptGroup]:
        """Attempts whose deadline (Unix time, seconds) has passed without an answer."""
        return [prompt for prompt in self.unanswered() if prompt.deadline < now]

    def next_batch(self) -> BatchPlan | None:
        """The next step's groups, when enough fresh ones are scored and the last batch is trained.

        Before that, useless ones, as far as they may make room for others.
        """
        if self.pending_step is not None:
            return None
        step = self.step + 1
        oldest = step - 1 - self._max_staleness
        scored = [group.scored for group in self._open.values() if group.scored is not None]
        fresh = sorted((s for s in scored if s.min_policy_version >= oldest), key=lambda s: s.group_id)
        stale = sorted(s.group_id for s in scored if s.min_policy_version < oldest)
        replaced = self._replaced(step, fresh)
        if replaced or len(fresh) < self._groups_per_step:
            return BatchPlan(step=step, groups=replaced, stale=stale) if replaced or stale else None
        return BatchPlan(step=step, groups=fresh[: self._groups_per_step], stale=stale)

    def record_batch(self, step: int, *, kept: list[str], filtered: list[str], stale: list[str]) -> None:
        """Bind the kept groups to a step; end the others."""
        num_kept, num_filtered = self.num_drawn(step)
        num_kept += sum(group_id in self._open and self._open[group_id].step is None for group_id in kept)
        self._drawn = (step, num_kept, num_filtered + sum(group_id in self._open for group_id in filtered))
        for group_id in kept:
            if group_id in self._open:
                self._open[group_id].step = step
        for group_id in filtered:
            self._end(group_id, End.FILTERED)
        for group_id in stale:
            self._end(group_id, End.STALE)
        if kept and step > self.step:
            self._unloaded[step] = len(filtered)

    def num_drawn(self, step: int) -> tuple[int, int]:
        """Groups that were kept for the newest step that anything was drawn for, and filtered; else 0 and 0."""
        return self._drawn[1:] if self._drawn[0] == step else (0, 0)

    def batch(self, step: int) -> list[ScoredGroup]:
        """The kept groups of a batched step, in order of issue."""
        bound = [g.scored for g in self._open.values() if g.step == step and g.scored is not None]
        return sorted(bound, key=lambda scored: scored.group_id)

    def traceparents(self, step: int) -> dict[str, str]:
        """Where each kept group of a batched step was issued, by its id."""
        return {group_id: group.prompt.traceparent for group_id, group in self._open.items() if group.step == step}

    def record_update(self, step: int, failed: Collection[str] = ()) -> list[str]:
        """The step's policy update is in: its groups end as trained, but for the failed ones. Returns all their ids."""
        if step <= self.step:
            return []
        ended = [group_id for group_id, group in self._open.items() if group.step == step]
        for group_id in ended:
            self._end(group_id, End.FAILED if group_id in failed else End.TRAINED)
        self._unloaded[step] = self._unloaded.get(step, 0) + len(ended)
        self.step = step
        return ended

    def record_loaded(self, policy_version: int) -> None:
        """Every live worker serves this version."""
        self.loaded_version = max(self.loaded_version, policy_version)
        self._unloaded = {step: n for step, n in self._unloaded.items() if step > self.loaded_version}

    def close(self) -> list[str]:
        """No further step will come: what is in flight ends as stale. Returns the ids."""
        left = list(self._open)
        for group_id in left:
            self._end(group_id, End.STALE)
        return left

    def end_of(self, group_id: str) -> End | None:
        """How a group ended; None while it is open or unknown."""
        return self._ended.get(group_id)

    def counts(self) -> dict[str, int]:
        """issued, in_flight, and one figure for each end."""
        ends = {end.value: count for end, count in self._ends.items()}
        return {"issued": sum(ends.values()) + len(self._open), **ends, "in_flight": len(self._open)}

    def _replaced(self, step: int, fresh: list[ScoredGroup]) -> list[ScoredGroup]:
        """Useless groups that end now, so that others are drawn in their place."""
        left = self._max_replaced - self.num_drawn(step)[1]
        return [group for group in fresh if self._is_useless(group)][:left] if left > 0 else []

    def _end(self, group_id: str, end: End) -> None:
        if self._open.pop(group_id, None) is None:
            return
        self._ended[group_id] = end
        self._ends[end] += 1
