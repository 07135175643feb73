"""From a TrainBatch to trajectories in memory: fetches its groups' blobs, and leaves out damaged groups."""

import asyncio

import numpy as np

from beamline.protocol.blobs import RoutedExperts, Trajectories, decode_blob
from beamline.protocol.errors import BeamlineError, BlobError, ProtocolError
from beamline.protocol.messages import MiniBatch as MiniBatchPlan
from beamline.protocol.messages import Place, TrainBatch, TrainGroup
from beamline.runtime.blob_store import BlobStore
from beamline.trainer.batch import Batch, MiniBatch, Trajectory
from beamline.trainer.routing import RoutingShape, TraceError, traces


async def assemble(message: TrainBatch, blobs: BlobStore, rank: int = 0, routing: RoutingShape | None = None) -> Batch:
    """The batch of one data-parallel rank.

    A group whose blobs are gone, damaged or do not fit each other or the model is left out, by all ranks alike, and
    named in `failed_groups`.

    Args:
        routing: the model's, for a run that replays routes; None reads none.

    Raises:
        BlobError: no group with loss tokens is left.
        ProtocolError: a mini-batch asks for a trajectory or advantage that is not there.
    """
    data_sources = sorted({group.data_source for group in message.groups})
    found = await asyncio.gather(
        *(_read(group, data_sources.index(group.data_source), blobs, routing) for group in message.groups)
    )
    groups = [group if isinstance(group, Columns) else None for group in found]
    failed = {
        group.group_id: str(why)
        for group, why in zip(message.groups, found, strict=True)
        if isinstance(why, BeamlineError)
    }
    mini_batches = [_mini_batch(message, plan, groups, rank) for plan in message.mini_batches]
    left = tuple(mini_batch for mini_batch in mini_batches if mini_batch is not None)
    if not left:
        raise BlobError(f"step {message.step}: none of its groups can be trained: {'; '.join(failed.values())}")
    return Batch(message.step, left, tuple(data_sources), failed)


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
    def lengths(self) -> list[int]:
        """Prompt and response tokens of each trajectory."""
        return (np.diff(self.ends) + len(self.prompt)).tolist()

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
            columns.routes = traces(routed, group.group_id, columns.lengths, routing)
    except (BlobError, ProtocolError, TraceError) as error:
        return error
    return columns


def _mini_batch(message: TrainBatch, plan: MiniBatchPlan, groups: list[Columns | None], rank: int) -> MiniBatch | None:
    """A rank's share, without the groups that failed; None where that leaves no rank a loss token."""
    if not 0 <= rank < len(plan.ranks):
        raise ProtocolError(f"step {message.step}: a batch for {len(plan.ranks)} ranks has no share for rank {rank}")
    trajectories: list[Trajectory] = []
    num_loss_tokens = 0
    for share, places in enumerate(plan.ranks):
        for place in places:
            advantage = _advantage(message, place)
            group = groups[place.group]
            if group is None:
                continue
            num_loss_tokens += group.num_loss_tokens(place.sample)
            if share == rank:
                trajectories.append(group.trajectory(place.sample, advantage))
    return MiniBatch(tuple(trajectories), num_loss_tokens) if num_loss_tokens else None


def _advantage(message: TrainBatch, place: Place) -> float:
    advantages = message.groups[place.group].advantages if place.group < len(message.groups) else []
    advantage = advantages[place.sample] if place.sample < len(advantages) else None
    if advantage is None:
        raise ProtocolError(f"step {message.step}: group {place.group}, sample {place.sample} has no advantage")
    return advantage
