"""What is gained by slots of an expert's own rank: memory for keys and values, and decoding speed.

    bin/python rollout -m benchmarks.lora_slots [--rounds=5] [--out=FILE]

Two engines on a small Beam of 32 experts, 8 a token, serve the same adapters: rank 64, and 8 for an expert. One has
slots of rank 64 for experts too, as vLLM has by itself; the other has them of rank 8. They sample the same 32 samples
by turns, with one thread each. Prints a table; `--out` has the keys of the summary.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.sampled_group import sampled_group
from benchmarks.slot_figures import SlotFigures, SlotSide, figures_of, rows

from beamline.models import tiny
from beamline.protocol.config import EngineSection
from beamline.protocol.lora_config import LoraSection
from beamline.rollout import environment
from beamline.rollout.engine import Engine

WORKER = "benchmarks.filled_worker.FilledWorker"
RANK, TOP_K = 64, 8
MODEL = replace(tiny.TINY_BEAM, hidden_size=256, num_experts=32, num_experts_per_tok=TOP_K, moe_intermediate_size=128)
LORA = LoraSection(rank=RANK, normalize_moe_lora=True)
EXPERT_RANKS = (RANK, RANK // TOP_K)
NUM_CONCURRENT, NUM_PROMPT_TOKENS, NUM_TOKENS = 32, 16, 64
ENGINE = EngineSection(kv_cache_mib=192, max_num_seqs=NUM_CONCURRENT, threads=1)
NUM_ROUNDS = 5
GROUP = sampled_group(NUM_CONCURRENT, NUM_PROMPT_TOKENS, NUM_TOKENS)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    environment.prepare(num_threads=1)
    with tempfile.TemporaryDirectory() as folder:
        tiny.build(MODEL, Path(folder), seed=0)
        figures = await measure(Path(folder), arguments.rounds)
    for name, figure, told in rows(figures):
        print(f"{name:24} {figure:>8}  {told}", flush=True)
    if arguments.out:
        arguments.out.write_bytes(msgspec.json.encode(figures))


async def measure(model: Path, num_rounds: int) -> SlotFigures:
    """Both engines, by turns; the first round warms up."""
    engines = [await start(model, rank) for rank in EXPERT_RANKS]
    try:
        sizes = [(await engine._call("fill", 1))[0] for engine in engines]
        rates: list[list[float]] = [[], []]
        for turn in range(num_rounds + 1):
            for side in (0, 1) if turn % 2 else (1, 0):
                rate = await tokens_per_s(engines[side])
                if turn:
                    rates[side].append(rate)
    finally:
        for engine in engines:
            await engine.close()
    return figures_of(*(_side(*found) for found in zip(EXPERT_RANKS, sizes, rates, strict=True)))


async def start(model: Path, expert_rank: int) -> Any:
    """A VllmEngine of `FilledWorker`s."""
    from beamline.rollout import vllm_engine, vllm_settings  # imports vLLM: after the environment is prepared

    vllm_settings.WORKER = WORKER
    config = msgspec.structs.replace(ENGINE, max_expert_lora_rank=expert_rank)
    length = NUM_PROMPT_TOKENS + NUM_TOKENS
    return await vllm_engine.VllmEngine.start(model, dtype="float32", max_model_tokens=length, config=config, lora=LORA)


async def tokens_per_s(engine: Engine) -> float:
    """Of one group."""
    started = time.monotonic()
    completions = await engine.generate(GROUP)
    return sum(len(completion.tokens) for completion in completions) / (time.monotonic() - started)


def _side(expert_rank: int, sizes: Sequence[int], rates: list[float]) -> SlotSide:
    expert_bytes, dense_bytes, num_blocks = sizes
    return SlotSide(
        expert_rank=expert_rank,
        expert_bytes=expert_bytes,
        dense_bytes=dense_bytes,
        num_blocks=num_blocks,
        tokens_per_s=rates,
    )


if __name__ == "__main__":
    asyncio.run(main())
