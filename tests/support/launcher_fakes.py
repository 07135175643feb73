"""The launcher's tests: its display, its command and its checks without a terminal or real services."""

import contextlib
import sys
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
)
from beamline.protocol.subjects import Subjects
from beamline.runtime.shm_blobs import shm_root

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
