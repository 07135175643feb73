"""What vLLM says of its own steps is what was sampled."""

from dataclasses import replace

import pytest

from rollout_messages import prompt_group

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_meter_counts_what_was_sampled(engine, model) -> None:
    tokens = model.reference["tokens"][0].tolist()
    await engine.forget_prefixes()
    before, engine.meter.kv_cache_peak = replace(engine.meter), 0.0
    completions = [
        *await engine.generate(prompt_group(tokens[:40], seeds=[1], max_tokens=12)),
        *await engine.generate(prompt_group(tokens[:40], seeds=[2, 3], max_tokens=12)),
    ]
    after = engine.meter
    assert after.num_generated_tokens - before.num_generated_tokens == sum(len(one.tokens) for one in completions)
    assert after.num_prompt_tokens - before.num_prompt_tokens == 3 * 40
    looked_up, hits = after.num_looked_up - before.num_looked_up, after.num_hits - before.num_hits
    assert looked_up == 3 * 40
    assert 0 < hits <= 2 * 40, "the second group finds the first one's prompt"
    assert 0 < after.kv_cache_peak <= 1
    assert (after.num_running, after.num_waiting, after.num_preemptions) == (0, 0, before.num_preemptions)
