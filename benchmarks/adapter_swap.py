"""For how long no token is sampled when adapters are swapped under load, how long a swap takes, and what it moves.

    bin/python rollout -m benchmarks.adapter_swap [--swaps=20] [--out=FILE]

One engine on Beam with 2.6 M parameters, adapters of rank 16, experts' of rank 4, and 64 requests under way at any
time. Each version is exported to shared memory first; what is timed begins with the engine's first word of it. Requests
under way go on under the new version and are computed anew ("keep"), or end with their own ("overlap").
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from benchmarks.swap_figures import Swaps, line

from beamline.models import tiny
from beamline.protocol import messages as m
from beamline.protocol.adapter import adapter_shapes, adapters_of
from beamline.protocol.config import EngineSection
from beamline.protocol.lora_config import LoraSection
from beamline.rollout import environment
from beamline.rollout.engine import Engine, Pause
from beamline.weights.manifest import WeightManifest, merge
from beamline.weights.shm import ShmOwner
from beamline.weights.tensors import Shard

WORKER = "benchmarks.swap_worker.TimedWorker"
MODES: tuple[Pause, ...] = ("keep", "overlap")
LORA = LoraSection(rank=16, normalize_moe_lora=True)
NUM_UNDER_WAY, NUM_PROMPT_TOKENS, NUM_TOKENS = 64, 32, 64
ENGINE = EngineSection(
    kv_cache_mib=128, max_num_seqs=NUM_UNDER_WAY, max_num_batched_tokens=512, threads=1, adapter_slots=3
)
"""Requests that are computed anew sample as soon as a step has all of their tokens: small steps let the first go on
early."""
SHAPES = dict(tiny.BENCH_BEAM.shapes())
STD = 0.02
REST_S = 1.0
"""Between two swaps: as long as requests last, so that none of them keeps a slot that is needed."""
SLOT_WAIT_S = 30.0
FAR_AWAY = 4e9
ITEM_BYTES = 4
versions = count(1)


async def main() -> int:
    """Measure both modes by turns in one engine, print a line for each, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    environment.prepare(num_threads=1)
    from beamline.rollout import vllm_engine, vllm_settings  # imports vLLM: after the environment is prepared

    vllm_settings.WORKER = WORKER
    with tempfile.TemporaryDirectory() as folder:
        tiny.build(tiny.BENCH_BEAM, Path(folder) / "model", seed=0)
        owner = ShmOwner(Path(folder) / "owner.sock")
        engine = await vllm_engine.VllmEngine.start(
            Path(folder) / "model",
            dtype="float32",
            max_model_tokens=NUM_PROMPT_TOKENS + NUM_TOKENS,
            config=ENGINE,
            lora=LORA,
        )
        try:
            modes = [await measure(engine, owner, pause, arguments.swaps) for pause in MODES]
        finally:
            await engine.close()
            owner.close()
    for mode in modes:
        print(line(mode), flush=True)
    if arguments.out:
        arguments.out.write_bytes(msgspec.json.encode(modes))
    return 0


async def measure(engine: Any, owner: ShmOwner, pause: Pause, num_swaps: int) -> Swaps:
    """All swaps of a mode; the first one warms up.

    Args:
        engine: a VllmEngine of `TimedWorker`s.
    """
    swaps: list[tuple[float, float]] = []
    async with under_way(engine):
        for _ in range(num_swaps + 1):
            await asyncio.sleep(REST_S)
            manifest = exported(owner)
            begun = time.monotonic()
            num_bytes = await engine.stage_weights(manifest, SLOT_WAIT_S)
            await engine.activate_weights(pause)
            swaps.append((begun, time.monotonic()))
        await asyncio.sleep(REST_S)
        (sampled_at,) = await engine._call("sampled_at")
    return summary(pause, swaps[1:], sampled_at, num_bytes)


@asynccontextmanager
async def under_way(engine: Engine) -> AsyncIterator[None]:
    """Inside, `NUM_UNDER_WAY` requests are sampled at any time; their lengths differ, so that they end one by one."""
    numbers, goes_on = count(), True

    async def follow_each_other() -> None:
        while goes_on:
            await engine.generate(group(next(numbers)))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(NUM_UNDER_WAY):
            tasks.create_task(follow_each_other())
        yield
        goes_on = False


def group(number: int) -> m.PromptGroup:
    """One sample, of a prompt of its own."""
    return m.PromptGroup(
        group_id=f"g-{number:06d}",
        attempt=0,
        purpose=m.Purpose.TRAIN,
        task=m.Task(prompt_id=f"p-{number}", data_source="none", grader="math_dapo", ground_truth=""),
        prompt_tokens=[5 + number % 400, *range(5, 4 + NUM_PROMPT_TOKENS)],
        sampling=m.Sampling(temperature=1.0, top_p=1.0, max_tokens=NUM_TOKENS // 2 + number % (NUM_TOKENS // 2)),
        seeds=[number],
        min_policy_version=0,
        deadline=FAR_AWAY,
    )


def exported(owner: ShmOwner) -> WeightManifest:
    """Adapters of a further version, none of them zero."""
    version = next(versions)
    rng = np.random.default_rng(version)
    shapes = adapter_shapes(adapters_of(SHAPES, LORA, tiny.BENCH_BEAM.num_experts_per_tok))
    arrays = {name: (STD * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    owner.export(version, [Shard.whole(name, "float32", array) for name, array in arrays.items()])
    return merge([owner.describe()])


def summary(pause: Pause, swaps: list[tuple[float, float]], sampled_at: list[float], num_bytes: int) -> Swaps:
    """Of what was timed."""
    gaps = [(begin, end) for begin, end in pairwise(sampled_at)]
    pauses = [max(end - begin for begin, end in gaps if end > first and begin < last) for first, last in swaps]
    quiet = [end - begin for begin, end in gaps if all(end <= first or begin >= last for first, last in swaps)]
    pause_p50_s, pause_p99_s = np.percentile(pauses, [50, 99]).tolist()
    step_p50_s, step_p99_s = np.percentile(quiet, [50, 99]).tolist()
    swap_p50_s, swap_p99_s = np.percentile([last - first for first, last in swaps], [50, 99]).tolist()
    return Swaps(
        pause=pause,
        num_under_way=NUM_UNDER_WAY,
        num_swaps=len(swaps),
        pause_p50_s=pause_p50_s,
        pause_p99_s=pause_p99_s,
        step_p50_s=step_p50_s,
        step_p99_s=step_p99_s,
        swap_p50_s=swap_p50_s,
        swap_p99_s=swap_p99_s,
        adapter_bytes=num_bytes,
        model_bytes=tiny.num_parameters(tiny.BENCH_BEAM) * ITEM_BYTES,
    )


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
