"""How a run whose trainer was lost goes on by itself: from its newest checkpoint, as long as that gets it further."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

from beamline.coordinator.launch.resume import Origin, Say, newest_whole
from beamline.coordinator.launch.supervisor import RestartPolicy, TrainerLost
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError


class Comeback:
    """Decides each time; a step that kills the trainer again and again ends the run.

    Args:
        policy: how often within which time.
        now: monotonic clock in seconds.
        say: shows a line.
    """

    def __init__(self, policy: RestartPolicy, now: Callable[[], float], say: Say) -> None:
        self._policy = policy
        self._now = now
        self._say = say
        self._times: deque[float] = deque()
        self._last_step: int | None = None

    def origin(self, lost: TrainerLost, config: RunConfig, run_dir: Path) -> Origin:
        """Where the run goes on.

        Raises:
            RunFailed: it does not; says why, and how it can be made to.
        """
        if not config.trainer.saves:
            raise lost.ends("trainer.checkpoint_interval=0 keeps no checkpoint: begin anew with --overwrite")
        try:
            origin = newest_whole(config, run_dir, self._say)
        except ConfigError as error:
            raise lost.ends(str(error)) from None
        if origin is None:
            raise lost.ends("there is no checkpoint yet to go on from: begin anew with --overwrite")
        self._refuse_standstill(lost, origin)
        self._say(f"{lost.how}; the run goes on after step {origin.step}, from {origin.folder}")
        return origin

    def _refuse_standstill(self, lost: TrainerLost, origin: Origin) -> None:
        if self._last_step is not None and origin.step <= self._last_step:
            raise lost.ends(
                f"it has gone on after step {self._last_step} before and come no further: mend what its log says first"
            )
        now = self._now()
        while self._times and now - self._times[0] > self._policy.window_s:
            self._times.popleft()
        if len(self._times) >= self._policy.max_restarts:
            often = f"it has gone on {len(self._times)} times within {self._policy.window_s:g} s"
            raise lost.ends(f"{often}: mend what its log says first")
        self._times.append(now)
        self._last_step = origin.step
