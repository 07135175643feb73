"""What a reward worker has graded since it was last asked, under the names of the metric schema."""

from collections import Counter
from collections.abc import Sequence

from beamline.reward.frames import Abstained, Outcome
from beamline.reward.pool import Graders


class GradingMeter:
    """Adds up outcomes, of groups that have failed too.

    Args:
        worker: its name.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._start()

    def add(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        """One group's outcomes, and the time from its arrival."""
        kinds = [outcome.kind for outcome in outcomes if isinstance(outcome, Abstained)]
        self._num_groups += 1
        self._num_graded += len(outcomes) - len(kinds)
        self._abstentions.update(kinds)
        self._seconds += seconds

    def take(self) -> dict[str, float]:
        """`grading/*` since the last call."""
        worker = self._worker
        values = {
            f"grading/groups/{worker}": float(self._num_groups),
            f"grading/graded/{worker}": float(self._num_graded),
            f"grading/seconds/{worker}": self._seconds,
            **{f"grading/abstained/{kind}/{worker}": float(count) for kind, count in self._abstentions.items()},
        }
        self._start()
        return values

    def _start(self) -> None:
        self._num_groups = self._num_graded = 0
        self._abstentions = Counter[str]()
        self._seconds = 0.0


def grading_gauges(worker: str, graders: Graders) -> dict[str, float]:
    """`grading/*` at this moment."""
    return {
        f"grading/running/{worker}": float(graders.num_running),
        f"grading/waiting/{worker}": float(graders.num_waiting),
        f"grading/processes/{worker}": float(graders.num_processes),
    }
