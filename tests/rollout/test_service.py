"""The whole service: a process on a real nats-server, with vLLM in it, through a policy, a crash and a drain."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import psutil
from safetensors.numpy import load_file

from beamline.models import tiny
from beamline.protocol import messages as m
from beamline.protocol.blobs import RoutedExperts, Trajectories, decode_blob
from beamline.runtime.deadline import deadline
from beamline.runtime.run_files import read_config, write_config
from beamline.weights.checkpoint import CheckpointOwner
from beamline.weights.manifest import CheckpointPlace, WeightManifest, merge
from beamline.weights.tensors import Shard
from brokers import SUBJECTS
from rollout_bench import closed
from rollout_messages import phase, prompt_group
from rollout_run import ANSWER_S, START_S, Run

REFERENCE = Path(__file__).parents[1] / "parity" / "references" / "tiny-beam.safetensors"


@contextmanager
def damaged_policy(folder: Path, version: int, weights: dict[str, np.ndarray]) -> Iterator[WeightManifest]:
    """A policy in a file of which one byte is wrong inside, and right again afterwards."""
    owner = CheckpointOwner(folder, rank=0)
    owner.export(version, [Shard.whole(name, array.dtype.name, array) for name, array in weights.items()])
    manifest = merge([owner.describe()])
    (place,), offset = manifest.places, manifest.tensors[0].pieces[0].offset
    assert isinstance(place, CheckpointPlace)

    def flip() -> None:
        with open(place.path, "r+b") as file:
            (before,) = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([before ^ 1]), offset)

    flip()
    yield manifest
    flip()


def descendants(process: asyncio.subprocess.Process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


async def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 15)
    assert not alive, f"still running: {alive}"


async def test_a_worker_serves_policies_groups_and_phases_and_survives_its_own_death(run: Run) -> None:
    reference = load_file(REFERENCE)
    tokens = reference["tokens"][0].tolist()
    canary = m.Canary(tokens=tokens, logprobs=reference["logprobs"][0].tolist())
    weights = load_file(run.model / "model.safetensors")
    coordinator = run.buses["coordinator"]

    process = await run.start()
    prepared = await run.publish_policy(0, run.exported(0, weights), canary, START_S)
    assert (prepared.policy_version, prepared.attempt, prepared.error) == (0, 1, "")
    assert prepared.num_bytes == sum(array.nbytes for array in weights.values())
    loaded = await run.open_fence(0)
    assert (loaded.policy_version, loaded.attempt, loaded.error) == (0, 1, "") and loaded.canary_gap < 1e-4

    await coordinator.publish(prompt_group(tokens[:40], seeds=[1, 2], max_tokens=16, group_id="g-1"))
    answer = await run.reward.take(m.TrajectoryGroup)
    blob = decode_blob(Trajectories, await run.blobs.get(answer.trajectories))
    assert answer.group_id == "g-1" and answer.worker == "rollout-0" and len(blob.texts) == 2
    assert blob.prompt_tokens.cast("B").cast("i").tolist() == tokens[:40]
    assert (np.frombuffer(blob.rollout_logprobs, np.float32) < 0).all()
    assert answer.routed_experts is not None
    routed = decode_blob(RoutedExperts, await run.blobs.get(answer.routed_experts))
    spec = tiny.TINY_BEAM
    assert (routed.num_layers, routed.top_k, routed.dtype) == (spec.num_layers, spec.num_experts_per_tok, "uint8")
    ids_RLK = np.frombuffer(routed.ids, np.uint8).reshape(-1, spec.num_layers, spec.num_experts_per_tok)
    assert len(ids_RLK) == sum(40 + length - 1 for length in answer.response_lengths)
    expected = reference["routed_experts"][0, :40]
    assert np.array_equal(np.sort(ids_RLK[:40], -1), np.sort(expected, -1)), "the prompt's, of the first sample"

    await coordinator.publish(prompt_group([5] * 400, seeds=[1], max_tokens=384, group_id="g-2"))
    failed = await run.coordinator.take(m.GroupFailed)
    assert (failed.group_id, failed.kind, failed.retryable) == ("g-2", "prompt_too_long", False)

    await coordinator.publish(phase(m.PhaseName.TRAIN, sequence=1, granted=False))
    report = await run.coordinator.take(m.LeaseReport)
    assert report.sequence == 1 and report.freed_bytes > 0 and report.resident_bytes > 100 << 20
    assert report.kept_bytes == 0

    tiny.build(tiny.TINY_BEAM, run.folder / "other", seed=8, randomise=True)
    other = run.exported(1, load_file(run.folder / "other" / "model.safetensors"))
    assert (await run.publish_policy(1, other, canary)).error == "", "its bytes are those that were exported"
    refused = await run.open_fence(1)
    assert refused.policy_version == 1 and "canary" in refused.error and refused.canary_gap > 1
    assert "policy 0 is served on" in refused.error
    await coordinator.publish(phase(m.PhaseName.GENERATE, sequence=2, granted=True))
    await coordinator.publish(prompt_group(tokens[:40], seeds=[1], max_tokens=16, group_id="g-5"))
    assert (await run.publish_policy(2, run.exported(2, weights), canary)).error == ""
    assert (await run.open_fence(2)).error == ""
    kept = await run.reward.take(m.TrajectoryGroup)
    assert (kept.group_id, kept.min_policy_version, kept.max_policy_version) == ("g-5", 2, 2), (
        "nothing new is sampled from a policy that a refused one should have replaced"
    )
    assert (
        blob.tokens.cast("B").cast("i").tolist()[: kept.response_lengths[0]]
        == decode_blob(Trajectories, await run.blobs.get(kept.trajectories)).tokens.cast("B").cast("i").tolist()
    ), "the same seed under the same weights"

    with damaged_policy(run.folder / "weights", 3, weights) as manifest:
        damaged = await run.publish_policy(3, manifest, canary)
        assert re.search(r"policy 3: tensor \S+ has checksum \w+, expected \w+", damaged.error)
        await coordinator.publish(prompt_group(tokens[:40], seeds=[1], max_tokens=16, group_id="g-6"))
        assert (await run.reward.take(m.TrajectoryGroup)).max_policy_version == 2, "the old policy is served meanwhile"
    await coordinator.publish(closed(3, attempt=2))
    mended = await run.coordinator.take(m.PolicyPrepared)
    assert (mended.policy_version, mended.attempt, mended.error) == (3, 2, "")
    loaded = await run.open_fence(3, attempt=2)
    assert (loaded.policy_version, loaded.attempt, loaded.error) == (3, 2, "") and loaded.canary_gap < 1e-4

    long = prompt_group(tokens[:40], seeds=list(range(16)), max_tokens=384, group_id="g-3", min_policy_version=3)
    await coordinator.publish(prompt_group(tokens[:9], seeds=[1], max_tokens=2, group_id="g-4"))
    await coordinator.publish(long)
    assert (await run.reward.take(m.TrajectoryGroup)).group_id == "g-4"
    children = descendants(process)
    assert children, "the engine core is a process of its own"
    process.kill()
    await process.wait()
    await assert_gone(children)

    second = await run.start()
    found = await run.coordinator.take(m.PolicyLoaded, START_S)
    assert (found.policy_version, found.attempt, found.error) == (3, 2, ""), "update and open fence are kept"
    again = await run.reward.take(m.TrajectoryGroup, ANSWER_S)
    assert (again.group_id, again.min_policy_version) == ("g-3", 3)
    children = descendants(second)
    second.terminate()
    async with deadline(40, "the service to drain"):
        assert await second.wait() == 0
    await assert_gone(children)


async def test_a_rank_that_dies_ends_the_service_with_a_plain_message(run: Run) -> None:
    config = read_config(run.folder)
    engine = msgspec.structs.replace(config.rollout.engine, tensor_parallel=2)
    rollout = msgspec.structs.replace(config.rollout, engine=engine)
    write_config(run.folder, msgspec.structs.replace(config, rollout=rollout))
    reference = load_file(REFERENCE)
    canary = m.Canary(tokens=reference["tokens"][0].tolist(), logprobs=reference["logprobs"][0].tolist())
    run.tasks.start(run.buses["coordinator"].subscribe(SUBJECTS.error(), run.coordinator))
    process = await run.start()
    manifest = run.exported(0, load_file(run.model / "model.safetensors"))
    assert (await run.publish_policy(0, manifest, canary, START_S)).error == ""
    loaded = await run.open_fence(0)
    assert loaded.error == "" and loaded.canary_gap < 1e-4
    children = descendants(process)
    of_the_engine_core = [child for child in children if child.parent() in children]
    last_rank = max(of_the_engine_core, key=psutil.Process.create_time)
    last_rank.send_signal(signal.SIGKILL)
    async with deadline(40, "the service to end"):
        assert await process.wait() == 1
    failed = await run.coordinator.take(m.ServiceFailed)
    assert re.search(r"one of its 2 ranks died \(tensor_parallel=2, pipeline_parallel=1\)", failed.error)
    await assert_gone(children)


async def test_a_model_without_a_tokenizer_is_refused_in_plain_words_before_vllm_is_imported(run: Run) -> None:
    (run.model / "tokenizer.json").unlink()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "importtime", "-m", "beamline.rollout", "--run-dir", str(run.folder)),
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    run.processes.append(process)
    async with deadline(60, "the service to refuse its model"):
        _, errors = await process.communicate()
    text = errors.decode()
    assert process.returncode == 2
    assert re.search(rf"error: model\.path='{re.escape(str(run.model))}' has no tokenizer\.json: .+", text)
    assert not imported(text) & {"torch", "vllm"}


async def test_help_imports_nothing_heavy() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "importtime", "-m", "beamline.rollout", "--help"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with deadline(30, "--help"):
        out, errors = await process.communicate()
    assert process.returncode == 0 and b"--run-dir" in out
    assert not imported(errors.decode()) & {"torch", "vllm", "nats", "transformers", "numpy"}


def imported(importtime: str) -> set[str]:
    """Top-level packages in the output of `python -X importtime`."""
    return {
        line.rsplit("|", 1)[1].strip().partition(".")[0] for line in importtime.splitlines() if line.count("|") == 2
    }
