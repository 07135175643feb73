"""Trajectory groups with their blobs, as rollout makes them."""

from beamline.protocol import messages as m
from beamline.protocol.blobs import Trajectories, cumulative, encode_blob, pack_float32, pack_int32


async def group_of(
    blobs,
    texts,
    *,
    lengths=None,
    reasons=None,
    environment_rewards=(),
    group_id="g-1",
    grader="math_dapo",
    ground_truth="5",
    prompt_tokens=(1, 2),
):
    lengths = lengths or [2] * len(texts)
    num_tokens = sum(lengths)
    trajectories = Trajectories(
        group_id=group_id,
        prompt_tokens=pack_int32(list(prompt_tokens)),
        cu_seqlens=cumulative(lengths),
        tokens=pack_int32([3] * num_tokens),
        loss_mask=memoryview(b"\1" * num_tokens),
        rollout_logprobs=pack_float32([-0.5] * num_tokens),
        finish_reasons=reasons or [m.FinishReason.STOP] * len(texts),
        version_spans=[[] for _ in texts],
        texts=list(texts),
        environment_rewards=list(environment_rewards),
    )
    return m.TrajectoryGroup(
        group_id=group_id,
        attempt=0,
        purpose=m.Purpose.TRAIN,
        task=m.Task(prompt_id="p", data_source="sums", grader=grader, ground_truth=ground_truth),
        worker="rollout-0",
        trajectories=await blobs.put(group_id, "trajectories", encode_blob(trajectories)),
        num_prompt_tokens=len(prompt_tokens),
        response_lengths=lengths,
        finish_reasons=trajectories.finish_reasons,
        min_policy_version=3,
        max_policy_version=4,
        generate_s=1.5,
    )
