"""The whole ring in one process over 200 seeds: deliveries twice, late and out of order, services killed at any moment.

Whatever happens, steps come in order, no group is trained twice, staleness stays in its bound, and the ledger closes.
"""

import asyncio
from pathlib import Path

import pytest

from ring_run import Ring, check


@pytest.mark.parametrize("seed", range(200))
def test_the_ring_keeps_its_promises(seed: int, tmp_path: Path):
    ring = Ring(seed, tmp_path)
    asyncio.run(ring.run())
    check(ring)


@pytest.mark.parametrize("seed", range(60))
def test_dynamic_sampling_fills_every_batch_that_it_may_fill(seed: int, tmp_path: Path):
    max_batches = 1 + seed % 4
    sampling = {"mode": "filter", "max_sample_batches": max_batches}
    ring = Ring(seed, tmp_path, equal_rewards=0.5, algorithm={"dynamic_sampling": sampling})
    asyncio.run(ring.run())
    steps = check(ring)
    groups_per_step = ring.config.rollout.sampling.groups_per_step
    for values in steps:
        num_filtered = values["sampling/filtered_groups"]
        num_kept = values["sampling/batches_drawn"] * groups_per_step - num_filtered
        assert 0 < num_kept <= groups_per_step
        if num_kept < groups_per_step:
            assert num_kept + num_filtered >= max_batches * groups_per_step, "it trained what it had too early"
        else:
            allowed = (max_batches - 1) * groups_per_step
            all_useless = num_filtered >= max_batches * groups_per_step
            assert num_filtered <= allowed or all_useless, "it drew more than it may while it had something to train"
    assert sum(values["sampling/filtered_groups"] for values in steps) == ring.core.ledger.counts()["filtered"]
