"""From a TrainBatch to trajectories in memory: fetches its groups' blobs, and leaves out damaged groups."""

import asyncio
from dataclasses import dataclass, replace

import numpy as np

from beamline.algorithms.reductions import Reduction, token_mean
from beamline.models.routing import RoutingShape, num_trace_rows
from beamline.protocol.blobs import RoutedExperts, Trajectories, decode_blob
from beamline.protocol.errors import BeamlineError, BlobError, ProtocolError
from beamline.protocol.messages import MiniBatch as MiniBatchPlan
from beamline.protocol.messages import Place, TrainBatch, TrainGroup
from beamline.runtime.blob_store import BlobStore
from beamline.trainer.batch import Batch, Group, MiniBatch, Trajectory
from beamline.trainer.routing import traces


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a run reads its batches."""

    reduction: Reduction = token_mean
    max_response_tokens: int = 0
    """For the reduction that divides by it."""
    routing: RoutingShape | None = None
    """The model's, for a run that replays routes; None reads none."""
    rewards: bool = False
    """Advantages are made again, so every group has to tell its rewards."""


PLAIN = Reading()


async def assemble(message: TrainBatch, blobs: BlobStore, rank: int = 0, how: Reading = PLAIN) -> Batch:
    """The batch of one data-parallel rank.

    A group whose blobs are gone, damaged or do not fit each other or the model is left out, by all ranks alike, and
    named in `failed_groups`.

    Raises:
        BlobError: no group with loss tokens is left.
        ProtocolError: a mini-batch asks for a trajectory or advantage that is not there, or rewards are missing.
    """
    if how.rewards:
        _check_rewards(message)
    data_sources = sorted({group.data_source for group in message.groups})
    found = await asyncio.gather(
        *(_read(group, data_sources.index(group.data_source), blobs, how.routing) for group in message.groups)
    )
    columns = [one if isinstance(one, Columns) else None for one in found]
    failed = {
        group.group_id: str(why)
        for group, why in zip(message.groups, found, strict=True)
        if isinstance(why, BeamlineError)
    }
    mini_batches = [_mini_batch(message, plan, columns, rank, how) for plan in message.mini_batches]
    left = tuple(mini_batch for mini_batch in mini_batches if mini_batch is not None)
    if not left:
        raise BlobError(f"step {message.step}: none of its groups can be trained: {'; '.join(failed.values())}")
    groups = tuple(_group(group, own is not None) for group, own in zip(message.groups, columns, strict=True))
    return Batch(message.step, left, tuple(data_sources), groups, failed)


class Columns:
    """A group's columns as arrays that share the blob's memory.

    Args:
        data_source: the group's, an index into `Batch.data_sources`.

    Raises:
        ProtocolError: version spans that leave out a token that is trained.
    """

    def __init__(self, group: Trajectories, data_source: int = 0) -> None:
        self.prompt = np.frombuffer(group.prompt_tokens, "<i4")
        self.ends = np.frombuffer(group.cu_seqlens, "<i4")
        self.tokens = np.frombuffer(group.tokens, "<i4")
        self.loss_mask = np.frombuffer(group.loss_mask, np.uint8)
        self.rollout_logprobs = np.frombuffer(group.rollout_logprobs, "<f4")
        self.policy_versions = _policy_versions(group, self.ends)
        self.data_source = data_source
        self.routes: list[np.ndarray] = []
        """One array a trajectory; empty where nothing is replayed."""

    @property
    def num_trace_rows(self) -> list[int]:
        """Of each trajectory, where its routed experts were recorded."""
        return [num_trace_rows(len(self.prompt), length) for length in np.diff(self.ends).tolist()]

    def num_loss_tokens(self, sample: int) -> int:
        return int(self.loss_mask[self.ends[sample] : self.ends[sample + 1]].sum())

    def trajectory(self, sample: int, advantage: float) -> Trajectory:
        rows = slice(self.ends[sample], self.ends[sample + 1])
        return Trajectory(
            tokens=np.concatenate((self.prompt, self.tokens[rows])).astype(np.int64),
            num_prompt_tokens=len(self.prompt),
            loss_mask=self.loss_mask[rows].astype(bool),
            rollout_logprobs=self.rollout_logprobs[rows],
            advantage=advantage,
            policy_versions=self.policy_versions[rows],
            data_source=self.data_source,
            routes=self.routes[sample] if self.routes else None,
        )


def _policy_versions(group: Trajectories, ends: np.ndarray) -> np.ndarray:
    """int64, one per response token of the group. Raises ProtocolError for spans that leave out one that is trained."""
    versions = np.full(ends[-1], -1, np.int64)
    for start, end, spans in zip(ends[:-1], ends[1:], group.version_spans, strict=True):
        for span in spans:
            versions[start:end][span.start : span.end] = span.policy_version
    missing = np.flatnonzero((versions < 0) & (np.frombuffer(group.loss_mask, np.uint8) > 0))
    if len(missing):
        sample = int(np.searchsorted(ends, missing[0], "right")) - 1
        raise ProtocolError(
            f"group {group.group_id}, sample {sample}: no policy version for response token "
            f"{missing[0] - ends[sample]}; its spans are "
            f"{[(span.start, span.end) for span in group.version_spans[sample]]}"
        )
    return versions


async def _read(
    group: TrainGroup, data_source: int, blobs: BlobStore, routing: RoutingShape | None
) -> Columns | BeamlineError:
    """A group's columns, or what is wrong with its blobs."""
    try:
        columns = Columns(decode_blob(Trajectories, await blobs.get(group.trajectories)), data_source)
        if routing is not None and group.routed_experts is not None:
            routed = decode_blob(RoutedExperts, await blobs.get(group.routed_experts))
            columns.routes = traces(routed, group.group_id, columns.num_trace_rows, routing)
    except (BlobError, ProtocolError) as error:
        return error
    return columns


def _check_rewards(message: TrainBatch) -> None:
    for group in message.groups:
        for sample, advantage in enumerate(group.advantages):
            if advantage is not None and (sample >= len(group.rewards) or group.rewards[sample] is None):
                raise ProtocolError(
                    f"step {message.step}: group {group.group_id}, sample {sample} has an advantage and no reward; "
                    "algorithm.kl.place=reward makes the one from the other"
                )


def _group(group: TrainGroup, is_read: bool) -> Group:
    return Group(group.group_id, tuple(group.rewards) if is_read else (None,) * len(group.rewards))


def _mini_batch(
    message: TrainBatch, plan: MiniBatchPlan, groups: list[Columns | None], rank: int, how: Reading
) -> MiniBatch | None:
    """A rank's share, without the groups that failed; None where that leaves no rank a loss token."""
    if not 0 <= rank < len(plan.ranks):
        raise ProtocolError(f"step {message.step}: a batch for {len(plan.ranks)} ranks has no share for rank {rank}")
    dealt = [
        (share, place, _advantage(message, place), groups[place.group])
        for share, places in enumerate(plan.ranks)
        for place in places
    ]
    there = [(share, place, advantage, group) for share, place, advantage, group in dealt if group is not None]
    num_tokens_N = [group.num_loss_tokens(place.sample) for _, place, _, group in there]
    if not sum(num_tokens_N):
        return None
    prompt_N = [place.group for _, place, _, _ in there]
    weights_N = how.reduction(num_tokens_N, prompt_N, how.max_response_tokens)
    trajectories = [
        replace(group.trajectory(place.sample, advantage), weight=weight, place=(place.group, place.sample))
        for (share, place, advantage, group), weight in zip(there, weights_N.tolist(), strict=True)
        if share == rank
    ]
    return MiniBatch(tuple(trajectories))


def _advantage(message: TrainBatch, place: Place) -> float:
    advantages = message.groups[place.group].advantages if place.group < len(message.groups) else []
    advantage = advantages[place.sample] if place.sample < len(advantages) else None
    if advantage is None:
        raise ProtocolError(f"step {message.step}: group {place.group}, sample {place.sample} has no advantage")
    return advantage
