"""Keeps a run's workers alive: what has died is started again, until that makes no sense any more."""

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from beamline.coordinator.launch.launcher import Launcher, WorkerSpec
from beamline.coordinator.observe.log_lines import tail
from beamline.protocol.errors import BeamlineError, ConfigError
from beamline.runtime.service import EXIT_CONFIG, EXIT_FAILED

NUM_TAIL_LINES = 30

type Notify = Callable[[str], None]
"""Shows the user one line."""


class RunFailed(BeamlineError):
    """The run cannot go on. Its text says which worker ended, how, and what it said last.

    Args:
        text: of the error.
        exit_code: of `beamline run`: the worker's own, as a shell has it.
    """

    def __init__(self, text: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class TrainerLost(RunFailed):
    """The trainer ended, and the optimizer's state with it: the run can go on from a checkpoint at most.

    Args:
        how: how it ended, in words.
        last_words: of its log.
        exit_code: as of `RunFailed`.
    """

    def __init__(self, how: str, last_words: str, exit_code: int) -> None:
        super().__init__(f"{how}; the optimizer's state went with it. {last_words}", exit_code)
        self.how = how
        self._last_words = last_words

    def ends(self, why: str) -> RunFailed:
        """The run's end by it, with the reason why it does not go on."""
        return RunFailed(
            f"{self.how}; the optimizer's state went with it, and {why}. {self._last_words}", self.exit_code
        )


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How often and how fast a worker is started again."""

    max_restarts: int = 5
    window_s: float = 600.0
    first_delay_s: float = 0.5
    max_delay_s: float = 15.0

    def delay_s(self, num_restarts: int) -> float:
        """Wait before the restart that follows `num_restarts` others within the window."""
        return min(self.first_delay_s * 2**num_restarts, self.max_delay_s)


class Supervisor:
    """Runs the workers until the coordinator has ended well.

    Args:
        launcher: starts and stops workers.
        policy: how often a worker may come back.
        notify: shows a line when something was started again.
        now: monotonic clock in seconds.
        done: whether the run is over, so that who has ended well may stay away.
    """

    def __init__(
        self,
        launcher: Launcher,
        policy: RestartPolicy,
        notify: Notify,
        now: Callable[[], float],
        done: Callable[[], bool],
    ) -> None:
        self._launcher = launcher
        self._policy = policy
        self._notify = notify
        self._now = now
        self._done = done

    async def run(self, specs: Sequence[WorkerSpec]) -> None:
        """Start the workers and return when the coordinator has finished its run.

        Raises:
            TrainerLost: the trainer ended.
            RunFailed: another worker cannot be kept alive.
            ConfigError: a worker refused a setting.
        """
        keepers = [asyncio.create_task(self._keep(spec), name=spec.worker) for spec in specs]
        (leader,) = [keeper for keeper, spec in zip(keepers, specs, strict=True) if spec.service == "coordinator"]
        pending = set(keepers)
        try:
            while leader in pending:
                ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for keeper in ended:
                    keeper.result()
        finally:
            for keeper in pending:
                keeper.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _keep(self, spec: WorkerSpec) -> None:
        """Start a worker again and again; returns when it has ended well and so has the run."""
        restarts: deque[float] = deque()
        while True:
            worker = await self._launcher.start(spec)
            code = await worker.wait()
            if code == 0:
                await asyncio.sleep(self._policy.first_delay_s)  # the news that the run is over may still be on its way
                if self._done():
                    return
            self._refuse_hopeless(spec, code)
            now = self._now()
            while restarts and now - restarts[0] > self._policy.window_s:
                restarts.popleft()
            if len(restarts) >= self._policy.max_restarts:
                often = f"it was started {len(restarts)} times again within {self._policy.window_s:g} s"
                raise RunFailed(f"{ending(spec, code)}; {often}. {last_words(spec.log)}", exit_code_of(code))
            delay_s = self._policy.delay_s(len(restarts))
            restarts.append(now)
            await asyncio.sleep(delay_s)
            self._notify(f"{ending(spec, code)}; starting it again (log: {spec.log})")

    def _refuse_hopeless(self, spec: WorkerSpec, code: int) -> None:
        """Raises RunFailed where another start cannot help, ConfigError where the user can."""
        if code == EXIT_CONFIG:
            raise ConfigError(refusal(spec.log) or ending(spec, code))
        if spec.service == "trainer":
            raise TrainerLost(ending(spec, code), last_words(spec.log), exit_code_of(code))
        if spec.service == "coordinator" and code == EXIT_FAILED:
            # It gave up with a reason (a wait that ran out, a ledger that does not close): not a crash.
            raise RunFailed(f"{ending(spec, code)}. {last_words(spec.log)}", exit_code_of(code))


def exit_code_of(code: int) -> int:
    """How a failed run ends by a worker that ended like this: never well, and by a signal as shells have it."""
    return 128 - code if code < 0 else code or EXIT_FAILED


def ending(spec: WorkerSpec, code: int) -> str:
    """How a worker ended, in words."""
    if code >= 0:
        return f"{spec.worker} ended with exit code {code}"
    try:
        return f"{spec.worker} was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"{spec.worker} was killed by signal {-code}"


def refusal(log: Path) -> str:
    """The last error line of a log: a service's reason for not starting. Empty if there is none."""
    reasons = [line for line in tail(log) if line.startswith("error: ")]
    return reasons[-1].removeprefix("error: ") if reasons else ""


def last_words(log: Path) -> str:
    """The log's path and the last traceback in it, or else its last lines."""
    lines = tail(log)
    if not lines:
        return f"It wrote nothing to its log, {log}"
    starts = [index for index, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    shown = lines[starts[-1] :] if starts else lines
    return "\n".join([f"The end of its log, {log}:", *(f"  {line}" for line in shown[-NUM_TAIL_LINES:])])
