"""A canary does not queue behind samples."""

import asyncio

import numpy as np
import pytest

from rollout_messages import prompt_group
from tiny_engines import ENGINE

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_canary_is_scored_at_once_however_much_is_under_way(engine, model) -> None:
    tokens = model.reference["tokens"][0].tolist()
    groups = [
        prompt_group(tokens[:5], seeds=list(range(ENGINE.max_num_seqs)), max_tokens=80, group_id=f"g-{number}")
        for number in range(3)
    ]
    undisturbed = await asyncio.gather(*map(engine.generate, groups))
    expected = np.array(await engine.score(tokens))
    crowd = [asyncio.create_task(engine.generate(group)) for group in groups]
    await asyncio.sleep(0)
    for _ in range(4):
        assert np.abs(np.array(await engine.score(tokens)) - expected).max() < 1e-4
        assert not any(task.done() for task in crowd)
    for mine, before in zip(await asyncio.gather(*crowd), undisturbed, strict=True):
        assert [completion.tokens for completion in mine] == [completion.tokens for completion in before]
