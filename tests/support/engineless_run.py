"""A run with the real launcher, broker, coordinator and reward, whose rollout and trainer have no engine.

    python engineless_run.py FOLDER NAME [SERVICE=BEHAVIOUR]... [A.B=C]...

`EnginelessRun` starts it and asks `beamline doctor stuck` about it.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Sequence
from pathlib import Path

import msgspec

from beamline.coordinator.launch.display import PlainDisplay
from beamline.coordinator.launch.launcher import WorkerSpec
from beamline.coordinator.launch.local import interpreter, service_command
from beamline.coordinator.launch.process_table import read_processes
from beamline.coordinator.launch.run import run
from beamline.protocol.config import RunConfig
from beamline.runtime.deadline import deadline
from launcher_fakes import read_until, trial_config

HERE = Path(__file__)
SERVICES = HERE.with_name("engineless.py")
GRADERS = HERE.parents[1] / "reward"
DOCTOR = (sys.executable, "-m", "beamline.coordinator.cli", "doctor", "stuck")
DOCTOR_S = 60.0
SMALL = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
"""A shell's command line that has shared memory of 1 MiB to itself."""
APART = ("unshare", "--map-root-user", "--mount")
"""Runs a command that may mount what it likes, and nobody else sees it."""


def can_mount() -> bool:
    """Whether a small store can be had here."""
    return subprocess.run((*APART, "sh", "-c", SMALL, "sh", "true"), capture_output=True, check=False).returncode == 0


def config_of(folder: Path, name: str, overrides: Sequence[str]) -> RunConfig:
    """Small groups, no end, no evaluation; rewards need not differ."""
    settings = msgspec.to_builtins(trial_config(folder))
    for override in (
        f"run.name={name}", "trainer.num_steps=1000000", "trainer.eval_interval=0", "data.evals=[]",
        "rollout.sampling.groups_per_step=4", "rollout.sampling.samples_per_group=2",
        "rollout.sampling.max_response_tokens=16", "reward.grader=planted_graders:by_text",
        "algorithm.drop_zero_variance=false", "algorithm.routing_replay=false", "algorithm.num_mini_batches=1",
        "telemetry.traces=false", *overrides,
    ):  # fmt: skip
        path, _, value = override.partition("=")
        *sections, key = path.split(".")
        section = settings
        for part in sections:
            section = section[part]
        section[key] = msgspec.yaml.decode(value.encode())
    return msgspec.convert(settings, RunConfig)


def main() -> None:
    folder, name, *arguments = sys.argv[1:]
    behaviours = dict(argument.split("=") for argument in arguments if "." not in argument.partition("=")[0])
    overrides = [argument for argument in arguments if "." in argument.partition("=")[0]]

    def command(spec: WorkerSpec) -> Sequence[str]:
        if spec.service in ("coordinator", "reward"):
            return service_command(spec)
        program = (
            str(interpreter("rollout")),
            str(SERVICES),
            f"{spec.service},{behaviours.get(spec.service, 'serve')}",
        )
        return (*program, "--run-dir", str(spec.run_dir), "--worker", spec.worker)

    asyncio.run(run(config_of(Path(folder), name, overrides), PlainDisplay(), command=command))


class EnginelessRun:
    """A run to be hurt and asked about. Use `start`, and `kill` at the end."""

    def __init__(self, folder: Path, name: str, process: Process, entered: Sequence[str]) -> None:
        self.folder = folder
        self.path = folder / "runs" / name
        self._process = process
        self._entered = entered

    @classmethod
    async def start(cls, folder: Path, name: str, *arguments: str, small_store: bool = False) -> "EnginelessRun":
        """Returns when the launcher runs; `small_store` gives it shared memory of its own, soon full."""
        command = (sys.executable, str(HERE), str(folder), name, *arguments)
        own = (*APART, "sh", "-c", SMALL, "sh") if small_store else ()
        process = await asyncio.create_subprocess_exec(
            *own,
            *command,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(GRADERS)},
        )
        target = ("--user", "--mount", "--preserve-credentials")
        return cls(folder, name, process, ("nsenter", f"--target={process.pid}", *target) if small_store else ())

    def pid(self, worker: str) -> int:
        """Of its newest process."""
        return read_processes(self.path)[worker]

    async def shown(self, *texts: str) -> str:
        """What the launcher shows, until all texts were in it."""
        return await read_until(self._process, *texts)

    async def ended(self) -> str:
        """All that it still showed, once it has ended by itself."""
        text = await read_until(self._process)
        assert await self._process.wait() == 0, text
        return text

    async def doctor(self, *options: str) -> tuple[int, str]:
        """Exit code and output of `beamline doctor stuck`."""
        arguments = (self.path.name, "--runs", str(self.path.parent), *options)
        process = await asyncio.create_subprocess_exec(*self._entered, *DOCTOR, *arguments, stdout=PIPE, stderr=STDOUT)
        async with deadline(DOCTOR_S, "beamline doctor stuck"):
            output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    async def until_stuck(self) -> str:
        """Ask the doctor until it says that the run is stuck; returns what it says."""
        async with deadline(DOCTOR_S, "the doctor to find the run stuck"):
            code, text = await self.doctor()
            while code == 0:
                code, text = await self.doctor()
        assert code == 1, text
        return text

    async def kill(self) -> None:
        """The guard ends what the launcher has started; stopped processes too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await read_until(self._process)


if __name__ == "__main__":
    main()
