"""Choices that a run's configuration makes, once, when the coordinator is built."""

import time

from beamline.coordinator.core import Core
from beamline.coordinator.lease import HOLDERS, ColocatedLease, GrantedLease, Lease
from beamline.protocol.config import Placement
from beamline.protocol.messages import Phase

_SEQUENCES_PER_BOOT = 1_000_000
"""Phases of a restarted coordinator are newer than all of its predecessor's."""


async def make_lease(core: Core) -> Lease:
    """The lease of `run.placement`; after a restart it starts from the phase that was published last."""
    first_sequence = core.state.boots * _SEQUENCES_PER_BOOT
    if core.config.run.placement is Placement.DISAGGREGATED:
        return GrantedLease(core.bus.publish, first_sequence)
    last = await core.bus.last(Phase)
    deadline_s = core.config.coordinator.lease_deadline_s
    return ColocatedLease(
        core.bus.publish,
        lambda condition, waiting_for, on: core.pulse.when(condition, waiting_for, deadline_s, on),
        core.roster,
        time.monotonic,
        first_sequence,
        holder=HOLDERS[last.phase] if last else "",
    )
