"""From a TrainBatch to trajectories in memory: fetches the blobs of this rank's mini-batches."""

import asyncio

import numpy as np

from beamline.protocol.blobs import Trajectories, decode_blob
from beamline.protocol.errors import ProtocolError
from beamline.protocol.messages import MiniBatch as MiniBatchPlan
from beamline.protocol.messages import TrainBatch
from beamline.runtime.blob_store import BlobStore
from beamline.trainer.batch import Batch, MiniBatch, Trajectory


async def assemble(message: TrainBatch, blobs: BlobStore, rank: int = 0) -> Batch:
    """The batch of one data-parallel rank. Raises BlobError for blobs that are gone or damaged.

    Raises ProtocolError for a mini-batch that asks for a trajectory or advantage that is not there.
    """
    payloads = await asyncio.gather(*(blobs.get(group.trajectories) for group in message.groups))
    groups = [decode_blob(Trajectories, payload) for payload in payloads]
    columns = [_Columns(group) for group in groups]
    return Batch(message.step, tuple(_mini_batch(message, plan, columns, rank) for plan in message.mini_batches))


class _Columns:
    """A group's columns as arrays that share the blob's memory."""

    def __init__(self, group: Trajectories) -> None:
        self.prompt = np.frombuffer(group.prompt_tokens, "<i4")
        self.ends = np.frombuffer(group.cu_seqlens, "<i4")
        self.tokens = np.frombuffer(group.tokens, "<i4")
        self.loss_mask = np.frombuffer(group.loss_mask, np.uint8)
        self.rollout_logprobs = np.frombuffer(group.rollout_logprobs, "<f4")

    def trajectory(self, sample: int, advantage: float) -> Trajectory:
        rows = slice(self.ends[sample], self.ends[sample + 1])
        return Trajectory(
            tokens=np.concatenate((self.prompt, self.tokens[rows])).astype(np.int64),
            num_prompt_tokens=len(self.prompt),
            loss_mask=self.loss_mask[rows].astype(bool),
            rollout_logprobs=self.rollout_logprobs[rows],
            advantage=advantage,
        )


def _mini_batch(message: TrainBatch, plan: MiniBatchPlan, columns: list[_Columns], rank: int) -> MiniBatch:
    if not 0 <= rank < len(plan.ranks):
        raise ProtocolError(f"step {message.step}: a batch for {len(plan.ranks)} ranks has no share for rank {rank}")
    trajectories: list[Trajectory] = []
    for place in plan.ranks[rank]:
        advantages = message.groups[place.group].advantages if place.group < len(columns) else []
        advantage = advantages[place.sample] if place.sample < len(advantages) else None
        if advantage is None:
            raise ProtocolError(f"step {message.step}: group {place.group}, sample {place.sample} has no advantage")
        trajectories.append(columns[place.group].trajectory(place.sample, advantage))
    return MiniBatch(tuple(trajectories), plan.num_loss_tokens)
