"""A made-up run of 20 steps, recorded as a coordinator would, for tests and for looking at the report."""

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from beamline.coordinator.eval_dumps import Completion
from beamline.coordinator.recorder import Recorder
from beamline.protocol.config import RunConfig, RunSection, TrainerSection
from beamline.protocol.messages import EvalResult

NUM_STEPS = 20
LEDGER = {"issued": 704, "trained": 612, "filtered": 83, "stale": 0, "failed": 9, "in_flight": 0}
VERSIONS = {
    "coordinator": {"python": "3.12.1", "msgspec": "0.20.0", "nats-py": "2.12.0"},
    "rollout": {"python": "3.12.1", "torch": "2.11.0", "vllm": "0.32.0"},
    "trainer": {"python": "3.12.1", "megatron-core": "0.19.0", "torch": "2.10.0"},
}


def make_config(run_dir: Path) -> RunConfig:
    return RunConfig(
        run=RunSection(name=run_dir.name, dir=str(run_dir.parent)),
        trainer=TrainerSection(num_steps=NUM_STEPS, eval_interval=5),
    )


def step_values(step: int) -> dict[str, float]:
    """A step of a run that learns."""
    noise, learnt = random.Random(step), step / (step + 8)
    generate, train, sync = 1.9 + noise.uniform(-0.2, 0.3), 1.4 + noise.uniform(-0.1, 0.1), 0.08
    length = 26 + 4.5 * learnt + noise.uniform(-0.3, 0.3)
    tokens = {"tokens/prompt": 32 * 8 * 31.0, "tokens/response": 32 * 8 * length}
    seconds = generate + train + sync + 0.12
    return {
        "reward/mean": -0.4 + 1.1 * learnt + noise.uniform(-0.06, 0.06),
        "reward/std": 0.9 - 0.3 * learnt,
        "reward/accuracy": 0.3 + 0.55 * learnt,
        "reward/pass_at_n": min(1.0, 0.8 + 0.2 * learnt),
        "policy/loss": 0.01 * noise.uniform(-1, 1),
        "policy/entropy": 0.42 - 0.2 * learnt,
        "policy/grad_norm": 0.35 + noise.uniform(0, 0.15),
        "policy/lr": 7e-4,
        "policy/mismatch_abs_mean": 2.1e-6 * noise.uniform(0.7, 1.6),
        "timing/generate": generate,
        "timing/train": train,
        "timing/sync": sync,
        "timing/step": seconds,
        "tokens/response_mean": length,
        "throughput/tokens_per_s": sum(tokens.values()) / seconds,
        **tokens,
    }


def eval_result(step: int, name: str = "chained-sums", offset: float = 0.0) -> EvalResult:
    accuracy = min(0.99, 0.30 + offset + 0.75 * step / (step + 8))
    return EvalResult(
        step=step,
        policy_version=step,
        name=name,
        num_problems=256,
        num_samples=8,
        values={
            "accuracy": accuracy,
            "accuracy_low": accuracy - 0.028,
            "accuracy_high": min(1.0, accuracy + 0.027),
            "pass_at_8": min(1.0, accuracy + 0.1),
        },
    )


def completions(step: int, count: int = 6) -> list[Completion]:
    """Wrong at first (the last term is left out), right later; two samples a problem."""
    made: list[Completion] = []
    for index in range(count):
        start, steps = 5 + index, [-2, 6, 3 + index % 3]
        used = steps if step > 5 * (index % 3) else steps[:-1]
        total, lines = start, []
        for term in used:
            lines.append(f"{total}{term:+d}={total + term}")
            total += term
        for sample in range(2):
            made.append(
                Completion(
                    prompt_id=f"problem-{index:03d}",
                    sample=sample,
                    prompt=f"Solve step by step and end with Answer: N.\n{start}" + "".join(f"{t:+d}" for t in steps),
                    completion="\n".join([*lines, f"Answer: {total}"]),
                    ground_truth=str(start + sum(steps)),
                    reward=1.0 if used == steps else -1.0,
                    correct=used == steps,
                    pred=str(total),
                    response_length=6 * len(used) + 8,
                    finish_reason="stop",
                )
            )
    return made


def record_run(recorder: Recorder, steps: Iterable[int] = range(NUM_STEPS + 1)) -> None:
    for step in steps:
        if step:
            recorder.record_step(step, step_values(step))
        if step % 5 == 0:
            recorder.record_eval(eval_result(step), completions(step))
            recorder.record_eval(eval_result(step, "chained-sums-greedy", offset=0.2), completions(step))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "demo"


class Clock:
    """Unix time that passes by 4 s with every look."""

    def __init__(self) -> None:
        self.unix_s = 1_800_000_000.0

    def __call__(self) -> float:
        self.unix_s += 4.0
        return self.unix_s


@pytest.fixture
def recorder(run_dir: Path) -> Recorder:
    return Recorder(run_dir, make_config(run_dir), versions=VERSIONS, now=Clock())


@pytest.fixture
def finished_run(run_dir: Path, recorder: Recorder) -> Path:
    """The folder of a whole run, with its summary and report."""
    record_run(recorder)
    recorder.finish("finished", LEDGER, checkpoint=str(run_dir / "checkpoints" / "global_step_20"))
    return run_dir


@pytest.fixture
def evaluated_run(run_dir: Path, recorder: Recorder) -> Path:
    """The folder of a run that took no step."""
    recorder.record_eval(eval_result(0), completions(0))
    recorder.finish("finished", dict.fromkeys(LEDGER, 0))
    return run_dir
