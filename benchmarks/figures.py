"""What is measured, and the figures that come of it. Pure arithmetic; seconds of wall clock throughout.

Tokens of a step are prompt and sampled tokens, a prompt counted once a sample, on every side alike.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import msgspec

TARGETS = {"step_vs_trl": 2.0, "generate_vs_vllm": 0.9, "overhead_share": 0.05, "sync_ms": 150.0}
"""The first two are lower bounds, the others are upper ones."""

AT_MOST = ("overhead_share", "sync_ms")

COMPUTE = ("timing/generate_engine", "timing/train_old_logprobs", "timing/train_update")
"""What a step is for. Grading runs beside generation; what of it does not is counted as overhead."""

RSS_PREFIX = "resources/rss_bytes/"


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step of one library: all of it, or its generation alone."""

    seconds: float
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return (self.prompt_tokens + self.response_tokens) / self.seconds

    @property
    def response_tokens_per_s(self) -> float:
        return self.response_tokens / self.seconds


class Side(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one library did, in order, warm-up left out."""

    steps: list[Step]

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("no step after the warm-up: measure more steps")

    @classmethod
    def join(cls, rounds: Iterable["Side"]) -> "Side":
        """The steps of all rounds."""
        return cls(steps=[step for side in rounds for step in side.steps])

    @property
    def median_step(self) -> Step:
        """Medians of seconds and tokens, each for itself."""
        return Step(
            seconds=median(step.seconds for step in self.steps),
            prompt_tokens=round(median(step.prompt_tokens for step in self.steps)),
            response_tokens=round(median(step.response_tokens for step in self.steps)),
        )


class Ring(msgspec.Struct, frozen=True, kw_only=True):
    """What Beamline's own metrics say of the measured steps."""

    steps: list[dict[str, float]]
    """Metrics of each step, under the names of docs/metrics.md."""

    @classmethod
    def join(cls, rounds: Iterable["Ring"]) -> "Ring":
        """The steps of all rounds."""
        return cls(steps=[step for ring in rounds for step in ring.steps])

    @property
    def whole(self) -> Side:
        """Whole steps: from the first phase to the last worker's load of the new policy."""
        return self._side("timing/step")

    @property
    def generation(self) -> Side:
        """The generate phase: from its grant to the last graded group."""
        return self._side("timing/generate")

    @property
    def overhead_share(self) -> float:
        """Median over the steps of the share of a step in which neither engine computed."""
        return median(1 - sum(step[part] for part in COMPUTE) / step["timing/step"] for step in self.steps)

    def medians(self, prefix: str) -> dict[str, float]:
        """Medians of the metrics under a prefix, by what follows it; those that only some steps have are left out."""
        names = [name for name in self.steps[0] if name.startswith(prefix) and all(name in step for step in self.steps)]
        return {name.removeprefix(prefix): median(step[name] for step in self.steps) for name in sorted(names)}

    def memory(self) -> dict[str, float]:
        """Largest resident bytes that a worker's heartbeats told."""
        names = sorted({name for step in self.steps for name in step if name.startswith(RSS_PREFIX)})
        return {name.removeprefix(RSS_PREFIX): max(step.get(name, 0.0) for step in self.steps) for name in names}

    def _side(self, timing: str) -> Side:
        return Side(
            steps=[
                Step(
                    seconds=step[timing],
                    prompt_tokens=int(step["tokens/prompt"]),
                    response_tokens=int(step["tokens/response"]),
                )
                for step in self.steps
            ]
        )


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one run of all sides."""

    step_vs_trl: float
    """Tokens per second of the median step, as a multiple of TRL's."""
    generate_vs_vllm: float
    """Sampled tokens per second of the median generate phase, as a share of bare vLLM's."""
    overhead_share: float
    """Share of a step that is neither generation nor training compute."""
    sync_ms: float
    """From the trainer's new policy to the last engine that serves it, fence and canary included: the median step."""

    def missed(self) -> list[str]:
        """Names of the figures that miss their targets."""
        return [name for name, target in TARGETS.items() if not _meets(name, getattr(self, name), target)]


def measured_steps(steps: Mapping[int, Mapping[str, float]], num_warm_up: int) -> Ring:
    """The steps after the warm-up.

    Raises:
        ValueError: none is left, or one lacks a metric that the figures need.
    """
    kept = [dict(steps[number]) for number in sorted(steps)[num_warm_up:]]
    if not kept:
        raise ValueError(f"{len(steps)} steps with {num_warm_up} of warm-up leave nothing to measure: run more steps")
    for needed in ("timing/step", "timing/generate", "timing/sync", "tokens/prompt", "tokens/response", *COMPUTE):
        if lacking := [step for step in kept if needed not in step]:
            raise ValueError(f"{len(lacking)} of {len(kept)} steps have no {needed}: the figures need it")
    return Ring(steps=kept)


def compare(ring: Ring, trl: Side, vllm: Side) -> Figures:
    """The three figures."""
    return Figures(
        step_vs_trl=ring.whole.median_step.tokens_per_s / trl.median_step.tokens_per_s,
        generate_vs_vllm=ring.generation.median_step.response_tokens_per_s / vllm.median_step.response_tokens_per_s,
        overhead_share=ring.overhead_share,
        sync_ms=1e3 * ring.medians("timing/")["sync"],
    )


def rows(figures: Figures, ring: Ring, trl: Side, vllm: Side) -> Sequence[tuple[str, str, str]]:
    """The table: what, figure, and its target or what it is made of."""
    step, generation = ring.whole.median_step, ring.generation.median_step
    whole_trl, bare = trl.median_step, vllm.median_step
    parts = ring.medians("timing/")
    return [
        ("step, Beamline", f"{step.tokens_per_s:,.0f} tok/s", _of(step)),
        ("step, TRL", f"{whole_trl.tokens_per_s:,.0f} tok/s", _of(whole_trl)),
        ("step_vs_trl", f"{figures.step_vs_trl:.2f} x", _target("step_vs_trl", "at least {} x")),
        ("generation, Beamline", f"{generation.response_tokens_per_s:,.0f} tok/s", _of(generation)),
        ("generation, bare vLLM", f"{bare.response_tokens_per_s:,.0f} tok/s", _of(bare)),
        ("generate_vs_vllm", f"{figures.generate_vs_vllm:.2f} x", _target("generate_vs_vllm", "at least {} x")),
        *(
            (f"  {name}", f"{seconds:.3f} s", f"{seconds / step.seconds:.1%} of a step")
            for name, seconds in parts.items()
        ),
        ("overhead_share", f"{figures.overhead_share:.1%}", _target("overhead_share", "at most {}")),
        ("sync_ms", f"{figures.sync_ms:.0f} ms", _target("sync_ms", "at most {} ms")),
        *((f"memory, {worker}", f"{size / 2**20:,.0f} MiB", "resident") for worker, size in ring.memory().items()),
    ]


def _meets(name: str, value: float, target: float) -> bool:
    return value <= target if name in AT_MOST else value >= target


def _target(name: str, words: str) -> str:
    return "target: " + words.format(TARGETS[name])


def _of(step: Step) -> str:
    return f"{step.prompt_tokens:,} prompt + {step.response_tokens:,} sampled tokens in {step.seconds:.2f} s"
