"""What training takes of every rank's memory, with adapters on a frozen model and without: before GPUs are rented.

    bin/python trainer -m benchmarks.lora_memory                                     # Beam, and tiny Beam for a check
    bin/python trainer -m benchmarks.lora_memory --recipe beam-lora-2node            # a run's own layout and adapters
    bin/python trainer -m benchmarks.lora_memory --recipe beam-lora-2node trainer.parallel.pipeline=4 model.lora.rank=32

Parameters, gradients and optimizer state are computed by building the trainer's model on torch's meta device; full
fine-tuning in the recipe's layout is shown beside it. Activations, the reference policy and what NCCL and the kernels
take come on top. The state is counted beside the model, where `trainer.optimizer.state=device` puts it.
"""

import argparse
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from benchmarks.memory_figures import BEAM, KEY_LAYOUT, Case, CaseMemory, RankMemory, figures_of, table

from beamline.protocol.config import ParallelSection
from beamline.protocol.errors import ConfigError
from beamline.protocol.layout import check_layout
from beamline.protocol.lora_config import LoraSection
from beamline.runtime.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
RANKS_DEADLINE_S = 120.0

BEAM_LORA = LoraSection(rank=64, alpha=64, normalize_moe_lora=True)
BEAM_CASES = (
    Case(model=BEAM, parallel=KEY_LAYOUT, lora=BEAM_LORA),
    Case(model=BEAM, parallel=msgspec.structs.replace(KEY_LAYOUT, data=4), lora=BEAM_LORA),
    Case(model=BEAM, parallel=KEY_LAYOUT),
    Case(model=BEAM, parallel=ParallelSection(tensor=4, expert=8, pipeline=4, data=4)),
)
"""Two nodes and four with adapters, full fine-tuning where the adapters are, and on eight nodes."""
TINY_LAYOUTS = (
    ParallelSection(),
    ParallelSection(tensor=2),
    ParallelSection(expert=2, data=2),
    ParallelSection(pipeline=2),
)
TINY_CASES = tuple(
    Case(model="asset:tiny-beam", dtype=dtype, parallel=parallel, lora=lora)
    for dtype, layouts in (("bfloat16", TINY_LAYOUTS), ("float32", TINY_LAYOUTS[:1]))
    for parallel in layouts
    for lora in (LoraSection(rank=16, normalize_moe_lora=True), LoraSection())
)


def recipe_cases(recipe: str, overrides: Sequence[str]) -> list[Case]:
    """As the recipe trains, and with all weights.

    Raises:
        ConfigError: the recipe or its layout cannot be, or its model is not known.
    """
    from benchmarks.model_shapes import shapes_of

    config = load_recipe(recipe, overrides)
    model, parallel = config.model, config.trainer.parallel
    check_layout(config, shapes_of(model.path).config.to_dict())
    full = Case(model=model.path, dtype=model.dtype, parallel=parallel)
    return [msgspec.structs.replace(full, lora=model.lora), full] if model.lora.is_on else [full]


def compute(cases: Sequence[Case]) -> list[CaseMemory]:
    """Raises ConfigError naming a model that is not known, or adapters that it cannot have."""
    from benchmarks.model_shapes import shapes_of
    from benchmarks.rank_memory import computed

    return [computed(case, shapes_of(case.model)) for case in cases]


def measure(cases: Sequence[Case], folder: Path) -> list[CaseMemory]:
    """The same in real ranks, two at most. Raises RuntimeError where one ends by an error."""
    (folder / "cases.json").write_bytes(msgspec.json.encode(cases))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory_rank", f"--out={folder}", f"--port={port}"]
    command.append(f"--cases={folder / 'cases.json'}")
    # Megatron-Bridge shows on stdout what it loads.
    ranks = [subprocess.Popen([*command, f"--rank={rank}"], cwd=ROOT, stdout=subprocess.DEVNULL) for rank in (0, 1)]
    try:
        codes = [rank.wait(RANKS_DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise RuntimeError(f"ranks of tiny models ended with exit codes {codes}: their errors are above")
    files = [(folder / f"rank-{rank}.json").read_bytes() for rank in (0, 1)]
    found = [one for file in files for one in msgspec.json.decode(file, type=list[tuple[Case, RankMemory]])]
    return [CaseMemory(case=case, ranks=[rank for other, rank in found if other == case]) for case in cases]


def show(memories: Sequence[CaseMemory]) -> None:
    """Print the table."""
    found = table(memories)
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    for row in found:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def main(arguments: Sequence[str] | None = None) -> int:
    """2 for what cannot be computed, 1 for a computation that a real trainer belies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", help="a YAML file, or the name of one in recipes/")
    parser.add_argument("overrides", nargs="*", help="of the recipe, as in trainer.parallel.tensor=8")
    parser.add_argument("--json", action="store_true", help="print every rank as JSON")
    parser.add_argument("--out", type=Path, help="JSON file to write, of Beam and tiny Beam")
    options = parser.parse_args(arguments)
    try:
        if options.recipe:
            memories = compute(recipe_cases(options.recipe, options.overrides))
        else:
            memories = compute([*BEAM_CASES, *TINY_CASES])
            with tempfile.TemporaryDirectory() as folder:
                figures = figures_of(memories, measure(TINY_CASES, Path(folder)))
            if options.out:
                options.out.write_bytes(msgspec.json.encode(figures))
    except ConfigError as error:
        print(f"lora_memory: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, ValueError) as error:
        print(f"lora_memory: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(msgspec.json.encode(memories).decode())
    else:
        show(memories)
    return 0


if __name__ == "__main__":
    sys.exit(main())
