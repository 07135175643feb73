"""Runs the three sides as a user would, one after the other, and reads what each wrote."""

import json
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from benchmarks.disk_figures import DiskFigures, DiskStep
from benchmarks.disk_figures import figures_of as disk_figures_of
from benchmarks.figures import Ring, Side, measured_steps
from benchmarks.memory_figures import MemoryFigures
from benchmarks.slot_figures import SlotFigures
from benchmarks.swap_figures import SwapFigures, Swaps
from benchmarks.swap_figures import figures_of as swap_figures_of
from benchmarks.weight_figures import Moved, WeightFigures, figures_of

from beamline.coordinator.metrics_file import read_metrics
from beamline.coordinator.progress_bar import working
from beamline.coordinator.prompts import tokenizer_of, train_cursor
from beamline.coordinator.seeds import sample_seed
from beamline.coordinator.summary import fold
from beamline.protocol.config import RunConfig
from beamline.runtime.run_files import read_config

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("runs/bench")
RING = FOLDER / "bench"
NUM_WARM_UP = 1
NUM_STEPS = 3
"""Measured steps of TRL and of vLLM; the recipe says how many the ring makes."""
NUM_ROUNDS = 3
"""Every side once a round, the steps of all rounds together: a slow minute of the machine does not decide."""
SIDE_DEADLINE_S = 1200.0
NUM_LAST_LINES = 20


QUIET_MACHINE = "GOMP_SPINCOUNT=100000"
"""OpenMP's threads may spin for their next piece of work: nothing else wants the cores. The same for every side."""


class SideFailed(Exception):
    """One side ended by an error; says its command and its last words."""


class Bench:
    """Runs commands in the checkout's root and keeps them for the record."""

    def __init__(self, num_rounds: int = NUM_ROUNDS) -> None:
        self.num_rounds = num_rounds
        self.commands: list[str] = []

    def ring(self) -> Ring:
        """Beamline, launched by its command line."""
        self.run(["env", QUIET_MACHINE, "bin/beamline", "run", "bench", "--overwrite"])
        _, steps = fold(read_metrics(ROOT / RING / "metrics.jsonl"))
        return measured_steps({step.step: step.values for step in steps if "timing/step" in step.values}, NUM_WARM_UP)

    def vllm(self) -> Side:
        """Bare vLLM on the prompts and seeds of the ring's first steps."""
        groups = FOLDER / "groups.json"
        (ROOT / groups).write_text(json.dumps(first_groups(read_config(ROOT / RING), NUM_WARM_UP + NUM_STEPS)))
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": 0}  # the core in the process of its user
        return self.side("rollout", "vllm_generate", FOLDER / "vllm.json", {"run": RING, "groups": groups}, variables)

    def trl(self) -> Side:
        """TRL on the same model and the same prompts."""
        config = read_config(ROOT / RING)
        sampling = config.rollout.sampling
        options = {
            "model": Path(config.model.path).relative_to(ROOT),
            "prompts": Path(config.data.train).relative_to(ROOT),
            "prompts-per-step": sampling.groups_per_step,
            "samples": sampling.samples_per_group,
            "max-tokens": sampling.max_response_tokens,
            "lr": config.trainer.optimizer.lr,
            "steps": NUM_STEPS,
            "threads": config.trainer.threads,
        }
        variables = {"OMP_NUM_THREADS": config.trainer.threads, "HF_HUB_OFFLINE": 1}
        return self.side("reference", "trl_step", FOLDER / "trl.json", options, variables)

    def weights(self) -> WeightFigures:
        """Every transport of weights, between two processes."""
        return figures_of(self.written("trainer", "weights", list[Moved]))

    def disk(self) -> DiskFigures:
        """Steps of an optimizer whose state is on a disk."""
        return disk_figures_of(self.written("trainer", "disk_adam", list[DiskStep], "env", QUIET_MACHINE))

    def memory(self) -> MemoryFigures:
        """What ranks of the trainer hold, with adapters and without."""
        return self.written("trainer", "lora_memory", MemoryFigures)

    def swaps(self) -> SwapFigures:
        """Adapters of an engine, swapped under load."""
        return swap_figures_of(self.written("rollout", "adapter_swap", list[Swaps], "env", QUIET_MACHINE))

    def slots(self) -> SlotFigures:
        """Slots of an expert's own rank beside those of the other layers'."""
        return self.written("rollout", "lora_slots", SlotFigures, "env", QUIET_MACHINE)

    def written[T](self, environment: str, module: str, kind: type[T], *before: str) -> T:
        """Run a module of ours that writes JSON of this type.

        Args:
            before: words that the command begins with.
        """
        out = FOLDER / f"{module}.json"
        (ROOT / out).unlink(missing_ok=True)
        self.run([*before, "bin/python", environment, "-m", f"benchmarks.{module}", f"--out={out}"])
        return msgspec.json.decode((ROOT / out).read_bytes(), type=kind)

    def side(
        self, environment: str, module: str, out: Path, options: Mapping[str, object], variables: Mapping[str, int]
    ) -> Side:
        """Run a module of ours in another environment, with variables set, and read the JSON that it writes."""
        (ROOT / out).unlink(missing_ok=True)
        words = [f"--{name}={value}" for name, value in {**options, "warm-up": NUM_WARM_UP, "out": out}.items()]
        settings = [f"{name}={value}" for name, value in variables.items()]
        self.run(["env", QUIET_MACHINE, *settings, "bin/python", environment, "-m", f"benchmarks.{module}", *words])
        return msgspec.json.decode((ROOT / out).read_bytes(), type=Side)

    def run(self, command: Sequence[str]) -> None:
        """Run one side; its output goes to a log.

        Raises SideFailed where it ends by an error or takes longer than SIDE_DEADLINE_S.
        """
        said = " ".join(command)
        self.commands.append(said)
        print(f"$ {said}", flush=True)
        log = ROOT / FOLDER / "logs" / f"{len(self.commands)}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file, working(f"command {len(self.commands)}"):
            try:
                code = subprocess.run(
                    command,
                    check=False,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=SIDE_DEADLINE_S,
                ).returncode
            except subprocess.TimeoutExpired:
                raise SideFailed(f"{said} did not end within {SIDE_DEADLINE_S:.0f} s; its output is in {log}") from None
        if code:
            with log.open(encoding="utf-8", errors="replace") as lines:
                last = "".join(deque(lines, NUM_LAST_LINES))
            raise SideFailed(f"{said} ended with exit code {code}; the end of {log}:\n{last}")


def first_groups(config: RunConfig, num_steps: int) -> list[list[dict[str, list[int]]]]:
    """Prompt tokens and seeds of the groups that a run issues first, by step."""
    sampling, cursor, position = config.rollout.sampling, train_cursor(config, tokenizer_of(config)), 0
    groups: list[dict[str, list[int]]] = []
    for number in range(num_steps * sampling.groups_per_step):
        prompt, position = cursor.draw(position)
        seeds = [sample_seed(config.run.seed, f"g-{number:06d}", s) for s in range(sampling.samples_per_group)]
        groups.append({"prompt_tokens": prompt.tokens, "seeds": seeds})
    size = sampling.groups_per_step
    return [groups[start : start + size] for start in range(0, len(groups), size)]
