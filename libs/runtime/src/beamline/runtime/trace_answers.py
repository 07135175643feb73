"""What a handler's answer says of its work, as attributes of the handler's span."""

from collections.abc import Mapping

from opentelemetry import trace

from beamline.protocol.messages import GroupFailed, Message, PolicyUpdate, ScoredGroup, TrajectoryGroup


def tell_answer(answer: Message) -> None:
    """Write the answer's figures onto the current span, if it is kept."""
    span = trace.get_current_span()
    if span.is_recording():
        span.set_attributes({f"beamline.{name}": value for name, value in _figures(answer).items()})


def _figures(answer: Message) -> Mapping[str, str | int | float]:
    match answer:
        case TrajectoryGroup():
            blobs = [blob for blob in (answer.trajectories, answer.routed_experts) if blob]
            return {
                "policy_version": _versions(answer.min_policy_version, answer.max_policy_version),
                "num_samples": len(answer.response_lengths),
                "num_response_tokens": sum(answer.response_lengths),
                "num_bytes": sum(blob.num_bytes for blob in blobs),
            }
        case ScoredGroup():
            return {
                "policy_version": _versions(answer.min_policy_version, answer.max_policy_version),
                "rewards": " ".join("none" if g.reward is None else f"{g.reward:g}" for g in answer.grades),
            }
        case GroupFailed():
            return {"failure": f"{answer.kind}: {answer.text}"}
        case PolicyUpdate():
            return {"policy_version": answer.policy_version, "num_failed_groups": len(answer.failed_groups)}
        case _:
            return {}


def _versions(oldest: int, newest: int) -> str | int:
    return oldest if oldest == newest else f"{oldest} to {newest}"
