"""The launcher's tests: its display, its command and its checks without a terminal or real services."""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable, Sequence
from pathlib import Path

from beamline.coordinator.launch.launcher import WorkerSpec
from beamline.models.datasets import PromptRow, write_rows
from beamline.protocol.config import (
    DataSection,
    EvalSet,
    ModelSection,
    RolloutSection,
    RunConfig,
    RunSection,
    SamplingSection,
    TelemetrySection,
)
from beamline.protocol.subjects import Subjects
from beamline.runtime.shm_blobs import shm_root

LAUNCH = Path(__file__).with_name("launch_trial.py")
DEADLINE_S = 60
SILENT_S = 4.0
"""Twice the time between two heartbeats."""
FAKE = Path(__file__).with_name("fake_service.py")


class LineDisplay:
    """Keeps the lines that a person would see."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def position(self, progress: object) -> None:
        pass

    def shown(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


def fake_command(**behaviours: str) -> Callable[[WorkerSpec], Sequence[str]]:
    """A launcher's command: each worker does what is said under its name, or else serves until stopped."""

    def command(spec: WorkerSpec) -> Sequence[str]:
        behaviour = behaviours.get(spec.worker.replace("-", "_"), "serve")
        arguments = (f"{spec.service},{behaviour}", "--run-dir", str(spec.run_dir), "--worker", spec.worker)
        return (sys.executable, str(FAKE), *arguments)

    return command


def trial_config(folder: Path) -> RunConfig:
    """A run called `trial` under `folder`, on a model and data that take no time to make."""
    sums = EvalSet(path="task:chained-sums", name="sums", max_problems=4)
    problems = (
        PromptRow(data_source="sums", messages=({"role": "user", "content": f"1+{i}"},), ground_truth=str(i), index=i)
        for i in range(4)
    )
    return RunConfig(
        run=RunSection(name="trial", dir=str(folder / "runs")),
        model=ModelSection(path="asset:bench"),
        data=DataSection(train=str(write_rows(folder / "train.parquet", problems)), evals=[sums], max_prompt_tokens=64),
        rollout=RolloutSection(sampling=SamplingSection(max_response_tokens=64)),
        telemetry=TelemetrySection(silent_s=SILENT_S),
    )


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def noted_pids(run_dir: Path) -> list[int]:
    """What the fake services wrote down: themselves and what they started."""
    return [int(path.read_text()) for path in run_dir.glob("*.pid")]


def shared_memory(run_dir: Path) -> Path:
    """Where a run of this folder keeps its blobs."""
    return shm_root(Subjects("beamline", run_dir.name), run_dir)


async def launch(folder: Path, *behaviours: str) -> Process:
    """A launcher of its own, running the trial in `folder`; behaviours as `worker=behaviour`."""
    return await asyncio.create_subprocess_exec(
        sys.executable, str(LAUNCH), str(folder), *behaviours, stdout=PIPE, stderr=STDOUT, start_new_session=True
    )


async def read_until(process: Process, *texts: str) -> str:
    """The launcher's output up to the line that completes what is awaited; to its end for no texts.

    The guard holds the same output open, so its end means that the guard has ended too.
    """
    assert process.stdout is not None
    read = ""
    async with asyncio.timeout(DEADLINE_S):
        while not texts or not all(text in read for text in texts):
            line = (await process.stdout.readline()).decode()
            if not line:
                break
            read += line
    assert all(text in read for text in texts), read
    return read
