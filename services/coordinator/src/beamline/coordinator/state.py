"""What a coordinator knows, as the sum of its journal: the same `apply` serves the live run and the replay."""

from beamline.coordinator import journal as j
from beamline.coordinator.ledger import Ledger
from beamline.protocol.messages import CheckpointSaved


class RunState:
    """Ledger, data position and what was evaluated. No I/O."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.position = 0
        """Data cursor: rows drawn so far, the dropped ones included."""
        self.boots = 0
        """Coordinator processes that have served this run, this one included."""
        self.evaluated: set[int] = set()
        """Policy versions whose evaluation is complete."""
        self.saved: CheckpointSaved | None = None
        """The newest complete checkpoint."""
        self.started = 0.0
        """Unix time of the first boot."""

    @property
    def num_dropped(self) -> int:
        """Prompts that were drawn and left out as too long, once for every time: each other row became a group."""
        return self.position - self.ledger.counts()["issued"]

    def apply(self, record: j.AnyRecord) -> None:
        """One step of the state; total and idempotent, except for boots, which count."""
        match record:
            case j.Booted():
                self.boots += 1
                self.started = self.started or record.time
            case j.Issued():
                self.ledger.issue(record.prompt)
                self.position = max(self.position, record.position)
            case j.Scored():
                self.ledger.record_scored(record.scored)
            case j.Failed():
                retry = self.ledger.record_failed(record.failed)
                if retry is not None:
                    self.ledger.issue(retry)
            case j.Batched():
                self.ledger.record_batch(record.step, kept=record.kept, filtered=record.filtered, stale=record.stale)
            case j.Updated():
                self.ledger.record_update(record.step, record.failed)
            case j.Evaluated():
                self.evaluated.add(record.policy_version)
            case j.Saved():
                self.saved = record.saved
            case j.Closed():
                self.ledger.close()
