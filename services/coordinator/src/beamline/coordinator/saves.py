"""Which policies the trainer was asked to keep, and what came of it."""

from beamline.protocol.messages import CheckpointSaved, SaveRequest


class Saves:
    """A pure state machine: methods are synchronous, total and idempotent.

    One request of a step is open at a time; a step may be asked for once more, for what was not asked before.
    """

    def __init__(self) -> None:
        self.copied_step = 0
        """The newest step whose policy is copied: it may change again."""
        self.checkpoint: CheckpointSaved | None = None
        """The newest whole checkpoint."""
        self.export: CheckpointSaved | None = None
        """The newest export."""
        self._open: dict[int, SaveRequest] = {}
        self._answers: dict[int, CheckpointSaved] = {}
        """The newest of each step."""
        self._checkpoint_step = 0
        self._export_step = 0

    def resume(self, step: int, path: str) -> None:
        """The run goes on from this checkpoint, which is therefore there."""
        self.checkpoint = self.checkpoint or CheckpointSaved(step=step, path=path)
        self._checkpoint_step = max(self._checkpoint_step, step)
        self.copied_step = max(self.copied_step, step)

    def record_request(self, request: SaveRequest) -> None:
        """Something of a step is about to be asked for."""
        if request.checkpoint:
            self._checkpoint_step = max(self._checkpoint_step, request.step)
        if request.export:
            self._export_step = max(self._export_step, request.step)
        self._open[request.step] = request

    def record_copied(self, step: int) -> None:
        """The trainer has its copy."""
        self.copied_step = max(self.copied_step, step)

    def record_saved(self, saved: CheckpointSaved) -> bool:
        """Take an answer, which says too that nothing is left to copy. False when it is not awaited."""
        if not self.awaits(saved):
            return False
        del self._open[saved.step]
        self._answers[saved.step] = saved
        self.copied_step = max(self.copied_step, saved.step)
        if saved.path:  # it may be whole although its export has failed
            self.checkpoint = saved
        if saved.export_path:
            self.export = saved
        return True

    def awaits(self, saved: CheckpointSaved) -> bool:
        """Whether this is an answer to an open request, and not an earlier one's once more."""
        return saved.step in self._open and saved != self._answers.get(saved.step)

    def request(self, step: int) -> SaveRequest | None:
        """What is asked for of a step, and not answered."""
        return self._open.get(step)

    def open_steps(self) -> list[int]:
        """Steps with an open request."""
        return sorted(self._open)

    def missing(self, step: int, *, checkpoint: bool, export: bool) -> tuple[bool, bool]:
        """Which of the two were never asked for, of a step that is not older than any other."""
        return checkpoint and self._checkpoint_step < step, export and self._export_step < step

    def error(self, step: int) -> str:
        """Why not all that was asked for of a step is kept; empty where it is, or where nothing is known."""
        answer = self._answers.get(step)
        return answer.error if answer else ""
