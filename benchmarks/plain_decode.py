"""What parameters that are views of the trainer's memory cost in decoding speed on a CPU: packed beside plain.

    bin/python rollout -m benchmarks.plain_decode

Two engines on one model, with one thread each, sample the same groups by turns; medians count. The default of
`rollout.engine.shared_parameters` follows the ratio.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.sampled_group import sampled_group

from beamline.models import tiny
from beamline.protocol.config import EngineSection
from beamline.rollout import environment
from beamline.rollout.engine import Engine

NUM_ROUNDS = 6
NUM_SAMPLES, NUM_PROMPT_TOKENS, NUM_TOKENS = 128, 32, 100
GROUP = sampled_group(NUM_SAMPLES, NUM_PROMPT_TOKENS, NUM_TOKENS)


async def main() -> None:
    environment.prepare(num_threads=1)
    from beamline.rollout.vllm_engine import VllmEngine  # imports vLLM: after the environment is prepared

    with tempfile.TemporaryDirectory() as folder:
        tiny.build(tiny.BENCH_BEAM, Path(folder), seed=0)
        engines: list[Engine] = []
        for shared in (False, True):
            config = EngineSection(kv_cache_mib=128, max_num_seqs=NUM_SAMPLES, threads=1, shared_parameters=shared)
            length = NUM_PROMPT_TOKENS + NUM_TOKENS
            engines.append(
                await VllmEngine.start(Path(folder), dtype="float32", max_model_tokens=length, config=config)
            )
        rates: list[list[float]] = [[], []]
        for turn in range(NUM_ROUNDS + 1):
            for side in (0, 1) if turn % 2 else (1, 0):
                rate = await tokens_per_s(engines[side])
                if turn:  # the first round warms up
                    rates[side].append(rate)
        for engine in engines:
            await engine.close()
    packed, plain = map(median, rates)
    print(f"packed {packed:,.0f} tokens/s, plain {plain:,.0f} tokens/s: {plain / packed:.2f} of packed")
    print("rounds:", *(f"{two / one:.2f}" for one, two in zip(*rates, strict=True)))


async def tokens_per_s(engine: Engine) -> float:
    """Of one group."""
    started = time.monotonic()
    completions = await engine.generate(GROUP)
    return sum(len(completion.tokens) for completion in completions) / (time.monotonic() - started)


if __name__ == "__main__":
    asyncio.run(main())
