"""The service as it is started: a process on a real nats-server, with Megatron and weights in shared memory."""

import asyncio
import signal
from pathlib import Path

import pytest_asyncio
import torch
from safetensors.torch import load_file

from beamline.protocol import messages as m
from beamline.protocol.config import OptimizerSection, ParallelSection, TrainerSection
from trainer_ring import START_S, STEP_S, Ring, open_ring

TRAINER = TrainerSection(threads=1, optimizer=OptimizerSection(lr=1e-3))


@pytest_asyncio.fixture
async def ring(tmp_path: Path):
    async with open_ring(tmp_path) as ring:
        yield ring


async def refusal(ring: Ring, trainer: TrainerSection) -> str:
    """The last line of a service that does not start."""
    process = await ring.start(trainer)
    _, log = await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode == 2, log.decode()
    assert "Traceback" not in log.decode()
    return log.decode().strip().splitlines()[-1]


async def test_two_steps_a_lease_an_export_and_a_checkpoint(ring: Ring):
    process = await ring.start(TRAINER)
    first = await ring.update(START_S)
    start = load_file(ring.run_dir / "model" / "model.safetensors")
    weights = await ring.weights(first)
    assert weights.keys() == start.keys()
    assert all(torch.equal(weights[name], start[name]) for name in start)

    for step in (1, 2):
        await ring.bus.publish(await ring.batch(step))
        update = await ring.update()
        assert (update.step, update.policy_version) == (step, step)
        assert update.stats["policy/ratio_mean"] == 1.0
        assert update.stats["tokens/loss"] == 41
        assert len(update.canary.logprobs) == len(update.canary.tokens) - 1
    weights = await ring.weights(update)
    assert not torch.equal(weights["lm_head.weight"], start["lm_head.weight"])

    await ring.bus.publish(m.Phase(sequence=1, step=3, phase=m.PhaseName.GENERATE, policy_version=2, granted=False))
    report = await ring.answer()
    assert isinstance(report, m.LeaseReport)
    assert (report.sequence, report.resident_bytes > 0) == (1, True)
    await ring.ask(2, checkpoint=False, export=True)
    exported = Path((await ring.saved()).export_path)
    for policy in (exported, await ring.checkpoint(2) / "policy"):
        stored = load_file(policy / "model.safetensors")
        assert all(torch.equal(stored[name], weights[name]) for name in weights)
        assert {"config.json", "tokenizer.json", "generation_config.json"} <= {path.name for path in policy.iterdir()}

    process.send_signal(signal.SIGTERM)
    _, log = await asyncio.wait_for(process.communicate(), STEP_S)
    assert process.returncode == 0, log.decode()


async def test_a_setting_that_cannot_work_is_a_plain_message(ring: Ring):
    assert await refusal(ring, TrainerSection(parallel=ParallelSection(tensor=3))) == (
        "error: trainer.parallel.tensor=3 does not divide the model's num_attention_heads=4: use 1, 2 or 4"
    )


async def test_a_model_without_a_tokenizer_is_a_plain_message(ring: Ring):
    (ring.run_dir / "model" / "tokenizer.json").unlink()
    assert "has no tokenizer.json: point it at a Hugging Face model directory" in await refusal(ring, TRAINER)
