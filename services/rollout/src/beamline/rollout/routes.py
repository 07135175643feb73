"""The routed experts that go out with a group."""

from collections.abc import Sequence

from beamline.models.routing import RoutingShape
from beamline.protocol.blobs import RoutedExperts
from beamline.protocol.errors import Rejected
from beamline.protocol.messages import PromptGroup, Purpose
from beamline.rollout.engine import Completion, Engine
from beamline.rollout.pack import pack_routed_experts


async def routes_to_send(
    group: PromptGroup, completions: Sequence[Completion], shape: RoutingShape | None, engine: Engine
) -> RoutedExperts | None:
    """None for an evaluation, of which nothing is replayed, unless it asks for them; and without a shape.

    Raises:
        Rejected: a trace cannot be replayed. What the engine has cached is forgotten: else every later group with the
            same first tokens would be handed the same rows.
    """
    if shape is None or not (group.purpose is Purpose.TRAIN or group.keep_routes):
        return None
    try:
        return pack_routed_experts(group, completions, shape)
    except Rejected:
        await engine.forget_prefixes()
        raise
