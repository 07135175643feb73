"""What a coordinator knows, as the sum of its journal: the same `apply` serves the live run and the replay."""

from beamline.coordinator import journal as j
from beamline.coordinator.ledger import End, Ledger
from beamline.coordinator.saves import Saves


class RunState:
    """Ledger, data position, what was evaluated and what was saved. No I/O."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.position = 0
        """Data cursor: rows drawn so far, the dropped ones included."""
        self.boots = 0
        """Coordinator processes that have served the run since it was launched, this one included."""
        self.has_begun = False
        """Whether anything was decided since the run was launched, a resumption included."""
        self.resumed: j.Resumed | None = None
        """Where the run goes on, if it does."""
        self.evaluated: set[int] = set()
        """Policy versions whose evaluation is complete."""
        self.saves = Saves()
        self.launched = 0.0
        """Unix time of the first boot since the run was launched."""

    @property
    def started(self) -> float:
        """Unix time of the run's first boot, which a resumed run has had in an earlier launch."""
        return self.resumed.started if self.resumed else self.launched

    @property
    def num_dropped(self) -> int:
        """Prompts that were drawn and left out as too long, once for every time: each other row became a group."""
        return self.position - self.ledger.counts()["issued"]

    def apply(self, record: j.AnyRecord) -> None:
        """One step of the state; total and idempotent, except for boots, which count."""
        self.has_begun = self.has_begun or not isinstance(record, j.Booted)
        match record:
            case j.Booted():
                self.boots += 1
                self.launched = self.launched or record.time
            case j.Resumed():
                self._resume(record)
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
            case j.SaveAsked():
                self.saves.record_request(record.request)
            case j.Copied():
                self.saves.record_copied(record.step)
            case j.Saved():
                self.saves.record_saved(record.saved)
            case j.Closed():
                self.ledger.close()

    def _resume(self, record: j.Resumed) -> None:
        if self.resumed is not None:
            return
        self.resumed = record
        self.ledger.restore(record.step, {End(end): count for end, count in record.ends.items()}, record.prompts)
        self.position = record.position
        self.evaluated.update(record.evaluated)
        self.saves.resume(record.step, record.path)
