"""Completions of a group as the columnar blobs that travel."""

from collections.abc import Sequence

from beamline.models.routing import RoutingShape, TraceError, num_trace_rows
from beamline.protocol.blobs import RoutedExperts, Trajectories, cumulative, pack_float32, pack_int32
from beamline.protocol.errors import Rejected
from beamline.protocol.messages import PromptGroup
from beamline.rollout.engine import Completion

FAULT = "routed_experts"
"""Kind of the failure of a group with a trace that cannot be replayed."""


def pack_trajectories(group: PromptGroup, completions: Sequence[Completion]) -> Trajectories:
    """The sampled side of the group."""
    masks = [completion.loss_mask or [True] * len(completion.tokens) for completion in completions]
    rewards = [completion.environment_reward for completion in completions]
    lengths = [len(completion.tokens) for completion in completions]
    return Trajectories(
        group_id=group.group_id,
        prompt_tokens=pack_int32(group.prompt_tokens),
        cu_seqlens=cumulative(lengths),
        tokens=pack_int32([token for completion in completions for token in completion.tokens]),
        loss_mask=memoryview(bytes(sampled for mask in masks for sampled in mask)),
        rollout_logprobs=pack_float32([logprob for completion in completions for logprob in completion.logprobs]),
        finish_reasons=[completion.finish_reason for completion in completions],
        version_spans=[completion.version_spans for completion in completions],
        texts=[completion.text for completion in completions],
        environment_rewards=[reward for reward in rewards if reward is not None],
    )


def pack_routed_experts(group: PromptGroup, completions: Sequence[Completion], shape: RoutingShape) -> RoutedExperts:
    """The group's routed experts. Raises Rejected for a trajectory whose trace is missing, cut short or impossible."""
    lengths = [num_trace_rows(len(group.prompt_tokens), len(completion.tokens)) for completion in completions]
    try:
        traces = shape.check([c.routed_experts for c in completions], lengths, f"group {group.group_id}")
    except TraceError as error:
        raise Rejected(FAULT, str(error)) from error
    return RoutedExperts(
        group_id=group.group_id,
        num_layers=shape.num_layers,
        top_k=shape.top_k,
        dtype=shape.dtype,
        cu_seqlens=cumulative(lengths),
        ids=memoryview(b"".join(trace.tobytes() for trace in traces)),
    )
