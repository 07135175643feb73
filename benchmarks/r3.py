"""Routing replay (R3): how much of the bfloat16 gap it closes, and what the routed traces cost.

The gap: tiny Beam, trained for some steps, then engine and trainer in bfloat16, each with kernels of its own; the mean
|old_logprobs - rollout_logprobs| of the same recipe with and without replay. The cost: steps of the demo with and
without, paired by step number. Seeds and weights are the same, so both sides of a pair do nearly the same work.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import msgspec
from benchmarks.sides import FOLDER, ROOT, Bench

from beamline.coordinator.metrics_file import read_metrics
from beamline.coordinator.summary import fold

TRAINED, MODEL = FOLDER / "r3-trained", FOLDER / "r3-model"
NUM_TRAINED_STEPS, NUM_GAP_STEPS, NUM_COST_STEPS = 10, 5, 12
COST_ROUNDS = (True, False, False, True, True, False)
"""Replay on or off; turned round so that a machine that slows down favours neither. Fewer runs leave some per cent of
noise."""
GAP = "policy/mismatch_abs_mean"
BEAM = {
    "num_hidden_layers": 52,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 49,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
"""What the full Beam's configuration says of its routes."""


class R3Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome; keys of the summary."""

    r3_gap_off: float
    """Mean |mismatch| without replay, bfloat16."""
    r3_gap_on: float
    r3_gap_ratio: float
    """How many times smaller the gap is with replay; the goal is 2.5."""
    trace_share: float
    """Share of the demo's step time that capture, transport and replay of the traces take; the goal is 0.05 at most."""
    route_bytes_per_token: dict[str, int]
    """Bytes of one token's trace: of sparse layers alone, and with the slots that dense layers keep, by model."""


def measure(bench: Bench) -> R3Figures:
    """Train, export, and run both halves. Raises SideFailed."""
    steps_of(bench, TRAINED, NUM_TRAINED_STEPS)
    shutil.rmtree(ROOT / MODEL, ignore_errors=True)
    bench.run(["bin/beamline", "export", str(TRAINED / "checkpoints/latest"), str(MODEL)])
    gaps = {replay: gap_of(bench, replay=replay) for replay in (False, True)}
    return R3Figures(
        r3_gap_off=gaps[False],
        r3_gap_on=gaps[True],
        r3_gap_ratio=gaps[False] / gaps[True],
        trace_share=trace_share(bench),
        route_bytes_per_token=route_bytes(ROOT / MODEL),
    )


def gap_of(bench: Bench, *, replay: bool) -> float:
    """Mean over the steps of a bfloat16 run that starts from the trained weights."""
    settings = (f"model.path={MODEL}", "model.dtype=bfloat16", "trainer.optimizer.lr=1e-5")
    steps = steps_of(bench, FOLDER / f"r3-gap-{_word(replay)}", NUM_GAP_STEPS, replay=replay, settings=settings)
    return mean(step[GAP] for step in steps)


def trace_share(bench: Bench) -> float:
    """Runs of the demo with and without replay, in turn."""
    runs = [
        (
            on,
            [
                step["timing/step"]
                for step in steps_of(bench, FOLDER / f"r3-cost-{_word(on)}", NUM_COST_STEPS, replay=on)
            ],
        )
        for on in COST_ROUNDS
    ]
    return added_share([run for on, run in runs if on], [run for on, run in runs if not on])


def added_share(replayed: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> float:
    """Median over pairs of like steps of what replay adds, as a share of the step with it.

    Args:
        replayed: seconds of each step, by run; the first step of a run is warm-up.
        plain: the same without replay, as many runs and steps.
    """
    pairs = [pair for runs in zip(replayed, plain, strict=True) for pair in list(zip(*runs, strict=True))[1:]]
    return median(1 - without / whole for whole, without in pairs)


def steps_of(
    bench: Bench, folder: Path, num_steps: int, *, replay: bool = True, settings: Sequence[str] = ()
) -> list[dict[str, float]]:
    """Run the demo's recipe without evaluations; the metrics of its steps."""
    bench.run(
        [
            "bin/beamline",
            "run",
            "tiny-beam",
            f"run.dir={folder.parent}",
            f"run.name={folder.name}",
            f"trainer.num_steps={num_steps}",
            "trainer.eval_interval=0",
            f"algorithm.routing_replay={str(replay).lower()}",
            *settings,
            "--overwrite",
        ]
    )
    _, steps = fold(read_metrics(ROOT / folder / "metrics.jsonl"))
    return [dict(step.values) for step in steps if "timing/step" in step.values]


def route_bytes(model: Path) -> dict[str, int]:
    """The model's and the full Beam's: one byte an expert id up to 256 experts."""
    own = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return {
        f"{name}, {part}": layers * config["num_experts_per_tok"] * (1 if config["num_experts"] <= 256 else 2)
        for name, config in (("tiny Beam", own), ("Beam", BEAM))
        for part, layers in (
            ("sparse layers", config["mlp_layer_types"].count("sparse")),
            ("as sent", config["num_hidden_layers"]),
        )
    }


def rows(figures: R3Figures) -> list[tuple[str, str, str]]:
    """The table's lines."""
    return [
        ("r3_gap_off", f"{figures.r3_gap_off:.5f}", "mean |mismatch| in bfloat16, live routing in the trainer"),
        ("r3_gap_on", f"{figures.r3_gap_on:.5f}", "the same with the engine's experts replayed"),
        ("r3_gap_ratio", f"{figures.r3_gap_ratio:.2f} x", "goal: at least 2.5 x"),
        ("trace_share", f"{figures.trace_share:.1%}", "of a step of the demo; goal: at most 5.0%"),
        *(
            (f"  {name}", f"{size} B", "a token's routed experts")
            for name, size in figures.route_bytes_per_token.items()
        ),
    ]


def _word(on: bool) -> str:
    return "on" if on else "off"
