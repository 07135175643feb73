"""What the coordinator's loops share: state, roster, bus, blobs, and the one way to change the state."""

import asyncio
import time
from collections.abc import Iterable

from beamline.coordinator import journal as j
from beamline.coordinator.batching import Batcher, advantage_of
from beamline.coordinator.fates import tell_fate
from beamline.coordinator.ledger import Ledger
from beamline.coordinator.roster import Roster
from beamline.coordinator.state import RunState
from beamline.coordinator.traces import Traces
from beamline.coordinator.waiting import Pulse
from beamline.protocol.config import RunConfig
from beamline.protocol.messages import PolicyUpdate
from beamline.runtime.blob_store import BlobStore
from beamline.runtime.bus import Bus


class Core:
    """Owned by the coordinator; its loops read the state freely and change it through `commit`."""

    def __init__(self, config: RunConfig, bus: Bus, blobs: BlobStore) -> None:
        self.config = config
        self.bus = bus
        self.blobs = blobs
        algorithm, groups_per_step = config.algorithm, config.rollout.sampling.groups_per_step
        self.batcher = Batcher(algorithm, advantage_of(algorithm), groups_per_step, config.trainer.parallel.data)
        replaced_batches = algorithm.dynamic_sampling.max_sample_batches - 1
        self.ledger = Ledger(
            groups_per_step=groups_per_step,
            max_staleness=config.coordinator.max_staleness,
            num_steps=config.trainer.num_steps,
            max_attempts=config.coordinator.max_attempts,
            max_replaced=replaced_batches * groups_per_step if algorithm.dynamic_sampling.mode == "filter" else 0,
            is_useless=self.batcher.is_useless,
        )
        self.state = RunState(self.ledger)
        self.traces = Traces(config.run.name, self.state)
        self.roster = Roster()
        self.pulse = Pulse()
        self.update: PolicyUpdate | None = None
        """The newest one that was heard of."""
        self.metrics: dict[str, float] = {}
        """The last step's numbers."""
        self.paused = False
        self.stopping = False
        self._committing = asyncio.Lock()

    async def replay(self) -> None:
        """Become what the journal says, then note this boot in it."""
        async for payload in self.bus.replay():
            self.state.apply(j.decode_record(payload))
        await self.commit(j.Booted(time=time.time()))

    async def commit(self, record: j.AnyRecord) -> None:
        """Journal, then apply: in this order, one at a time, so that a replay repeats the live order."""
        async with self._committing:
            await self.bus.append(j.encode_record(record))
            self.state.apply(record)
            tell_fate(record, self.ledger, self.traces)
        self.pulse.beat()

    async def release(self, group_ids: Iterable[str]) -> None:
        """Drop the blobs of groups that have ended."""
        for group_id in group_ids:
            await self.blobs.release(group_id)

    @property
    def last_step(self) -> int:
        """The step after which the run ends: configured, or the present one when it is stopping."""
        pending = self.ledger.pending_step or self.ledger.step
        return pending if self.stopping else self.config.trainer.num_steps
