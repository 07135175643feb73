"""Finished runs for the doctor, and faults planted in what they kept."""

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from adapter_checkpoints import adapters_with, make_adapter_checkpoint
from beamline.coordinator.doctor.case import Options, case_of_run
from beamline.coordinator.doctor.diagnose import diagnose
from beamline.coordinator.doctor.diagnosis import Diagnosis
from beamline.coordinator.doctor.engine_tokens import read_engine_tokens
from beamline.coordinator.doctor.mismatch import evidence_of
from beamline.coordinator.launch.local import environment, interpreter
from beamline.models.chat import ChatTokenizer
from beamline.protocol.algorithm_config import AlgorithmSection
from beamline.protocol.blobs import RoutedExperts, Trajectories, VersionSpan, decode_blob, encode_blob
from beamline.protocol.config import DataSection, ModelSection, RolloutSection, RunConfig, RunSection
from beamline.protocol.config import SamplingSection as Sampling
from beamline.protocol.doctor import READINGS, Recomputed, SampleRequest
from beamline.protocol.lora_config import LoraSection
from beamline.runtime.request_program import read_request, write_request
from beamline.runtime.run_files import read_config, write_config
from beamline.runtime.sample_files import read_index, read_recomputed
from made_adapters import made
from real_runs import Ended, beamline

HERE = Path(__file__).parent
TEMPERATURE = 0.7
LORA = LoraSection(rank=8, normalize_moe_lora=True)
STEP = 3
MAKE_DEADLINE_S, SAMPLE_DEADLINE_S, EXAMINE_DEADLINE_S = 120, 120, 240
SAMPLER = ("-m", "beamline.rollout.sample")
FAULTY_SAMPLER = (str(HERE / "faulty_engine.py"),)
NUM_AT_ONCE = 4

type Edit = Callable[[Trajectories], Trajectories]


@dataclass(frozen=True)
class FinishedRun:
    """The folder of a run that has ended after STEP steps."""

    path: Path

    @property
    def samples(self) -> Path:
        return self.path / "doctor"

    @property
    def diagnosis(self) -> Diagnosis:
        """What the doctor found."""
        return msgspec.json.decode((self.samples / "mismatch.json").read_bytes(), type=Diagnosis)

    @property
    def readings(self) -> Recomputed:
        """What the trainer read."""
        return read_recomputed(self.samples / READINGS)

    def copy(self, name: str, *, dtype: str = "float32", routing_replay: bool = True) -> "FinishedRun":
        """Another run, with the same checkpoint and samples."""
        path = self.path.parent / name
        shutil.copytree(self.path, path, symlinks=True)
        lora = read_config(path).model.lora
        write_config(path, run_config(self.path.parent / "model", path, dtype, routing_replay, lora))
        return FinishedRun(path)

    def sample_anew(self, program: Sequence[str] = SAMPLER, **changes: str) -> None:
        """Have an engine sample the same prompts again.

        Args:
            program: what rollout's interpreter runs.
            changes: of the request: another model or dtype.
        """
        path = self.samples / "rollout-request.json"
        write_request(path, msgspec.structs.replace(read_request(path, SampleRequest), **changes))
        command = [str(interpreter("rollout")), *program, str(path), str(self.samples)]
        done = subprocess.run(
            command,
            env=environment(os.environ, len(os.sched_getaffinity(0))),
            capture_output=True,
            text=True,
            timeout=SAMPLE_DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def edit(self, edit: Edit) -> None:
        """Change every group's trajectories."""
        for kept in read_index(self.samples).groups:
            path = self.samples / kept.trajectories
            path.write_bytes(encode_blob(edit(decode_blob(Trajectories, path.read_bytes()))))

    def set_logprobs(self, logprobs_L: np.ndarray) -> None:
        """Let the engine have said these."""
        rest = logprobs_L

        def take(group: Trajectories) -> Trajectories:
            nonlocal rest
            number = memoryview(group.rollout_logprobs).nbytes // 4
            own, rest = rest[:number], rest[number:]
            return msgspec.structs.replace(group, rollout_logprobs=memoryview(own.astype("<f4").tobytes()))

        self.edit(take)
        assert len(rest) == 0

    def shift_experts(self, num_experts: int) -> None:
        """Every routed expert becomes the next one."""
        for kept in read_index(self.samples).groups:
            path = self.samples / kept.routed_experts
            blob = decode_blob(RoutedExperts, path.read_bytes())
            ids = (np.frombuffer(blob.ids, np.uint8) + 1) % num_experts
            path.write_bytes(encode_blob(msgspec.structs.replace(blob, ids=memoryview(ids.astype("u1").tobytes()))))


def finished_run(model: Path, path: Path) -> FinishedRun:
    """A run that kept no samples."""
    path.mkdir()
    (path / "launcher.lock").touch()
    write_config(path, run_config(model, path))
    make_checkpoint(model, path / "checkpoints")
    return FinishedRun(path)


def adapted_run(model: Path, path: Path) -> FinishedRun:
    """A run of tiny Beam with LoRA that kept no samples; no adapter of its checkpoint is zero."""
    path.mkdir()
    (path / "launcher.lock").touch()
    write_config(path, run_config(model, path, lora=LORA))
    made_tensors = made(adapters_with("tiny-beam", LORA))
    make_adapter_checkpoint(path / "checkpoints", STEP, model, "tiny-beam", LORA, made_tensors)
    return FinishedRun(path)


@dataclass(frozen=True)
class Examined:
    """A run that the doctor has seen."""

    run: FinishedRun
    ended: Ended


def examine(run: FinishedRun, *options: str) -> Ended:
    """`beamline doctor mismatch`, as a user starts it."""
    return beamline("doctor", "mismatch", str(run.path), *options, deadline_s=EXAMINE_DEADLINE_S)


def one_a_core() -> ThreadPoolExecutor:
    """A few threads of one core each; the processes that they start keep to it."""
    cores = sorted(os.sched_getaffinity(0))[:NUM_AT_ONCE]
    return ThreadPoolExecutor(len(cores), initializer=lambda: os.sched_setaffinity(0, {cores.pop()}))


def judge(run: FinishedRun, recomputed: Recomputed) -> Diagnosis:
    """The diagnosis from readings that are there already."""
    case, samples = case_of_run(run.path, Options()), read_index(run.samples)
    engine = read_engine_tokens(run.samples, samples, ChatTokenizer.load(case.engine_model).decode)
    return diagnose(run.path.name, evidence_of(case, samples, engine, recomputed), samples, recomputed)


def run_config(
    model: Path, path: Path, dtype: str = "float32", routing_replay: bool = True, lora: LoraSection | None = None
) -> RunConfig:
    return RunConfig(
        run=RunSection(name=path.name, dir=str(path.parent)),
        model=ModelSection(path=str(model), dtype=dtype, lora=lora or LoraSection()),
        data=DataSection(max_prompt_tokens=64),
        rollout=RolloutSection(sampling=Sampling(max_response_tokens=48, temperature=TEMPERATURE)),
        algorithm=AlgorithmSection(routing_replay=routing_replay),
    )


def make_checkpoint(model: Path, root: Path, *perturbed: str) -> None:
    command: Sequence[str] = [str(interpreter("trainer")), str(HERE / "make_checkpoint.py"), str(model), str(root)]
    subprocess.run([*command, str(STEP), *perturbed], check=True, timeout=MAKE_DEADLINE_S)


def roll_tokens(group: Trajectories) -> Trajectories:
    """Every response token one place late; the last becomes the first."""
    ends = np.frombuffer(group.cu_seqlens, "<i4")
    tokens = np.frombuffer(group.tokens, "<i4").copy()
    for start, end in pairwise(ends):
        tokens[start:end] = np.roll(tokens[start:end], 1)
    return msgspec.structs.replace(group, tokens=memoryview(tokens.tobytes()))


def sampled_earlier(group: Trajectories) -> Trajectories:
    """The first half of every response by the policy before, whose log-probabilities are others."""
    ends = np.frombuffer(group.cu_seqlens, "<i4")
    logprobs = np.frombuffer(group.rollout_logprobs, "<f4").copy()
    spans: list[list[VersionSpan]] = []
    for start, end in pairwise(ends):
        half, length = (end - start) // 2, end - start
        logprobs[start : start + half] -= 0.3
        spans.append([VersionSpan(STEP - 1, 0, int(half)), VersionSpan(STEP, int(half), int(length))])
    return msgspec.structs.replace(group, rollout_logprobs=memoryview(logprobs.tobytes()), version_spans=spans)
