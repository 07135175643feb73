"""A made-up run that learns, written down as a real one is: by recorder, span exporter and log formatter."""

import json
import logging
import os
import random
import sys
from pathlib import Path

import msgspec
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from beamline.coordinator.eval_dumps import Completion
from beamline.coordinator.recorder import Recorder
from beamline.coordinator.samples import KeptCompletion, KeptGroup, samples_path
from beamline.protocol.config import RunConfig, RunSection, TrainerSection
from beamline.protocol.messages import EvalResult
from beamline.runtime.json_log import JsonFormatter
from beamline.runtime.run_files import write_config
from beamline.runtime.span_file import SpanFile
from beamline.runtime.trace_context import STEP

NUM_STEPS = 20
EVAL_EVERY = 5
LEDGER = {"issued": 704, "trained": 612, "filtered": 83, "stale": 0, "failed": 9, "in_flight": 0}
BEGUN = 1_800_000_000.0
"""Unix seconds."""
STEP_S = 4.0
WORKERS = {"coordinator": "coordinator", "rollout-0": "rollout", "rollout-1": "rollout", "reward": "reward",
           "trainer": "trainer"}  # fmt: skip
TRAIN_PARTS = (("assemble", 0.0, 0.1), ("old_logprobs", 0.1, 0.45), ("mini_batch", 0.45, 0.8),
               ("mini_batch", 0.8, 1.15), ("optimizer", 1.15, 1.25), ("export", 1.25, 1.4))  # fmt: skip


class ShownRun:
    """Step by step.

    Args:
        run_dir: made here.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        section = RunSection(name=run_dir.name, dir=str(run_dir.parent))
        self.config = RunConfig(run=section, trainer=TrainerSection(num_steps=NUM_STEPS, eval_interval=EVAL_EVERY))
        write_config(run_dir, self.config)
        os.utime(run_dir / "config.json", (BEGUN, BEGUN))
        self._now = BEGUN
        self.recorder = Recorder(run_dir, self.config, versions={"trainer": {"torch": "2.10.0"}}, now=lambda: self._now)
        self._tracers = {worker: _tracer(run_dir, worker) for worker in WORKERS}

    def begin(self) -> None:
        """What is done before the first step: an evaluation, in a trace of its own."""
        root = self._span("coordinator", "start", BEGUN - STEP_S, STEP_S, None)
        self._span("coordinator", "evaluate", BEGUN - STEP_S, STEP_S / 2, root)

    def evaluate(self, step: int) -> None:
        """Two data sources, as the held-out problems of a run that learns."""
        for name, offset in (("chained-sums", 0.0), ("chained-sums-greedy", 0.2)):
            accuracy = min(0.99, 0.30 + offset + 0.75 * step / (step + 8))
            values = {
                "accuracy": accuracy,
                "accuracy_low": accuracy - 0.028,
                "accuracy_high": min(1.0, accuracy + 0.027),
            }
            result = EvalResult(
                step=step, policy_version=step, name=name, num_problems=256, num_samples=8, values=values
            )
            self.recorder.record_eval(result, [_completion(step)])

    def step(self, step: int) -> None:
        """Values, spans and completions of one step."""
        self._now = BEGUN + step * STEP_S
        values = step_values(step)
        self._spans(step, values)
        self._samples(step)
        self.recorder.record_step(step, values)

    def whole(self, status: str = "finished") -> Path:
        """All steps, an error in the trainer's log, and the end."""
        self.evaluate(0)
        for step in range(1, NUM_STEPS + 1):
            self.step(step)
            if step % EVAL_EVERY == 0:
                self.evaluate(step)
        self.log_error("trainer", "a checkpoint took longer than its interval")
        (self.run_dir / "launcher.lock").touch()
        self.recorder.finish(
            status, LEDGER, checkpoint=str(self.run_dir / "checkpoints" / "global_step_20"), started=BEGUN
        )
        return self.run_dir

    def log_error(self, worker: str, message: str) -> None:
        """As a worker's process logs it."""
        try:
            raise RuntimeError("the disk is slow")
        except RuntimeError:
            record = logging.LogRecord("beamline.trainer", logging.ERROR, __file__, 1, message, (), sys.exc_info())
        path = self.run_dir / "logs" / f"{worker}.log"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as log:
            log.write(JsonFormatter(worker).format(record) + "\n")

    def _spans(self, step: int, values: dict[str, float]) -> None:
        begin = self._now - STEP_S
        root = self._span("coordinator", "step", begin, STEP_S, None, {STEP: step})
        at = begin
        for phase in ("generate", "train", "sync"):
            seconds = values[f"timing/{phase}"]
            inside = self._span("coordinator", phase, at, seconds, root)
            if phase == "generate":
                self._groups(step, at, seconds, inside)
            elif phase == "train":
                whole = self._span("trainer", "train step", at, 1.4, inside)
                for name, start, end in TRAIN_PARTS:
                    self._span("trainer", name, at + start, end - start, whole)
            else:
                for worker in ("rollout-0", "rollout-1"):
                    self._span(worker, "activate", at, seconds, inside)
            at += seconds

    def _groups(self, step: int, at: float, seconds: float, parent: trace.Span) -> None:
        noise = random.Random(step)
        for number in range(12):
            worker = f"rollout-{number % 2}"
            start, took = at + 0.1 * (number // 4), noise.uniform(0.5, 0.8) * seconds
            generated = self._span(worker, "generate group", start, took, parent)
            self._span("reward", "score group", start + took, 0.05, generated)

    def _span(
        self,
        worker: str,
        name: str,
        begin: float,
        seconds: float,
        parent: trace.Span | None,
        attributes: dict | None = None,
    ) -> trace.Span:
        context = trace.set_span_in_context(parent) if parent is not None else None
        span = self._tracers[worker].start_span(name, context, attributes=attributes, start_time=round(begin * 1e9))
        span.end(round((begin + seconds) * 1e9))
        return span

    def _samples(self, step: int) -> None:
        path = samples_path(self.run_dir / "samples", step)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"".join(msgspec.json.encode(kept_group(step, number)) + b"\n" for number in range(2)))


def step_values(step: int) -> dict[str, float]:
    """Numbers of a step of a run that learns."""
    noise, learnt = random.Random(step), step / (step + 8)
    generate, train, sync = 1.9 + noise.uniform(-0.2, 0.3), 1.4 + noise.uniform(0, 0.1), 0.18
    length = 26 + 4.5 * learnt + noise.uniform(-0.3, 0.3)
    tokens = {"tokens/prompt": 32 * 8 * 31.0, "tokens/response": 32 * 8 * length}
    seconds = generate + train + sync + 0.12
    ended = {name: count * step // NUM_STEPS for name, count in LEDGER.items() if name not in ("issued", "in_flight")}
    return {
        "reward/mean": -0.4 + 1.1 * learnt + noise.uniform(-0.06, 0.06),
        "reward/accuracy": 0.3 + 0.55 * learnt,
        "policy/entropy": 0.42 - 0.2 * learnt,
        "policy/grad_norm": 0.35 + noise.uniform(0, 0.15),
        "policy/mismatch_abs_mean": 2.1e-6 * noise.uniform(0.7, 1.6) * (40 if step == 12 else 1),
        "timing/generate": generate,
        "timing/train": train,
        "timing/sync": sync,
        "timing/step": seconds,
        "tokens/response_mean": length,
        "throughput/tokens_per_s": sum(tokens.values()) / seconds,
        "ledger/issued": float(sum(ended.values()) + 32),
        "ledger/in_flight": 32.0,
        **{f"ledger/{name}": float(count) for name, count in ended.items()},
        **{f"resources/rss_bytes/{worker}": (0.3 + 0.2 * n) * 2**30 for n, worker in enumerate(WORKERS)},
        **tokens,
    }


def kept_group(step: int, number: int) -> KeptGroup:
    """A sum with one right and one wrong answer."""
    prompt = f"Solve step by step and end with Answer: N.\n{5 + number}-2+6"
    right = 9 + number
    return KeptGroup(
        group_id=f"g-{step:04d}{number:02d}",
        data_source="chained-sums",
        prompt=prompt,
        ground_truth=str(right),
        completions=[
            KeptCompletion(
                text=f"{5 + number}-2={3 + number}\nAnswer: {answer}",
                reward=reward,
                breakdown={"raw": reward, "acc": float(answer == right)},
                pred=str(answer),
                length=14,
                finish_reason="stop",
                policy_version=step - 1,
            )
            for answer, reward in ((right, 1.0), (3 + number, -1.0))
        ],
    )


def summary_of(run_dir: Path) -> dict:
    """`summary.json` as plain data."""
    return json.loads((run_dir / "summary.json").read_text())


def _completion(step: int) -> Completion:
    return Completion(
        prompt_id="problem-000", sample=0, prompt="5-2+6", completion=f"Answer: {step}", ground_truth="9", reward=-1.0,
        correct=False, response_length=8, finish_reason="stop",
    )  # fmt: skip


def _tracer(run_dir: Path, worker: str) -> trace.Tracer:
    named = {"service.name": f"beamline-{WORKERS[worker]}", "service.instance.id": worker}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(SpanFile(run_dir / "traces" / f"{worker}.jsonl")))
    return provider.get_tracer(__name__)
