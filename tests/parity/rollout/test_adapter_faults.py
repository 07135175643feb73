"""Adapters that must not be served: whatever is wrong with them, what is served is not touched."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from beamline.protocol import messages as m
from beamline.protocol.errors import WeightError
from beamline.weights.checkpoint import CheckpointOwner
from beamline.weights.manifest import WeightManifest, merge
from beamline.weights.nixl import NixlOwner
from lora_variants import VARIANTS
from rollout_bench import Bench
from rollout_messages import close_owners, damage, policy_update, readers_are
from served_adapters import HALVED, NUM_SLOTS, Served, adapters, halved, one_span, shards
from tiny_engines import load

pytestmark = pytest.mark.asyncio(loop_scope="session")

NAME = "model.layers.2.mlp.experts.5.up_proj.lora_B.weight"
SUPPORT = Path(__file__).parents[2] / "support"


def another_models() -> dict[str, np.ndarray]:
    return adapters(model="tiny-qwen3-moe")


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> dict[str, np.ndarray]:
    tensors = adapters(seed=3)
    return tensors | {name: change(tensors[name].copy())}


def spoilt(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def put(array: np.ndarray) -> np.ndarray:
        array[7, 1] = value
        return array

    return put


REFUSALS = {
    "not a number": (
        changed(NAME, spoilt(np.nan)),
        rf"rank 0 of 1: policy \d+: tensor {NAME} is not finite at \[7, 1\], nor in 0 places more: its training",
    ),
    "infinite": (changed(NAME, spoilt(np.inf)), rf"policy \d+: tensor {NAME} is not finite at \[7, 1\]"),
    "shape": (
        changed(NAME, lambda array: array[:-1]),
        rf"tensor {NAME} has shape \[\d+, 2\], that of the model's adapter is \[\d+, 2\]: is it an adapter from anoth",
    ),
    "rank": (adapters(VARIANTS["full-alpha2"]), r"has shape \[8, \d+\], that of the model's adapter is \[2, \d+\]"),
    "missing": (
        {name: array for name, array in adapters().items() if name != NAME},
        rf"tensor {NAME} is missing, one of 1: export all adapters of model\.lora",
    ),
    "unknown": (
        adapters() | {NAME.replace("up_proj", "upper_proj"): np.zeros((4, 4), np.float32)},
        rf"experts\.5\.upper_proj\.lora_B\.weight is unknown to the model's adapters; the nearest it has is {NAME}: is",
    ),
    "another model's": (another_models(), r"policy \d+: tensor \S+ .*: is it an adapter from another model, or with"),
    "integers": (changed(NAME, lambda array: array.astype(np.int8)), rf"tensor {NAME} is int8, the engine holds float"),
    "damaged": (adapters(seed=3), rf"rank 0 of 1: policy \d+: tensor {NAME} has checksum [0-9a-f]+, expected"),
    "gone": (adapters(seed=3), r"rank 0 of 1: policy \d+: cannot get its weights from"),
}


@pytest.mark.parametrize("fault", REFUSALS)
async def test_adapters_that_are_refused_change_nothing(served: Served, fault: str) -> None:
    tensors, words = REFUSALS.get(
        fault, (adapters(seed=3), {"damaged": "has checksum", "gone": "cannot get"}.get(fault))
    )
    manifest = served.offer(tensors)
    if fault == "damaged":
        damage(manifest, NAME)
    elif fault == "gone":
        close_owners()
    group = served.group(5, max_tokens=30)
    (expected,) = await served.engine.generate(group)
    under_way = asyncio.create_task(served.engine.generate(group))
    with pytest.raises(WeightError, match=words):
        await served.engine.stage_weights(manifest)
    with pytest.raises(WeightError, match="no policy is staged"):
        await served.engine.activate_weights()
    await readers_are(0)
    (completion,) = await under_way
    assert one_span(completion, served.version) and completion.tokens == expected.tokens
    await served.assert_serves()


async def test_a_file_that_was_cut_short_is_refused(served: Served, tmp_path: Path) -> None:
    owner = CheckpointOwner(tmp_path / "weights", 0)
    owner.export(served.new_version(), shards(adapters(seed=3)))
    manifest = owner.describe()
    path = Path(manifest.places[0].path)
    os.truncate(path, path.stat().st_size - 64)
    with pytest.raises(WeightError, match="it was cut short"):
        await served.engine.stage_weights(manifest)
    await served.assert_serves()


@pytest.mark.parametrize("transport", ["checkpoint", "nixl"])
async def test_other_transports_carry_adapters_too(served: Served, tmp_path: Path, transport: str) -> None:
    owner = CheckpointOwner(tmp_path / "weights", 0) if transport == "checkpoint" else NixlOwner()
    try:
        owner.export(served.new_version(), shards(halved(adapters())))
        await load(served.engine, merge([owner.describe()]))
        await served.assert_serves(HALVED)
    finally:
        owner.close()


async def test_a_version_for_which_no_slot_is_free_is_refused_and_fits_once_requests_have_ended(served: Served) -> None:
    engine, long, manifests = served.engine, [], []
    for number in range(NUM_SLOTS):
        long.append(asyncio.create_task(engine.generate(served.group(number, num_samples=2, max_tokens=240))))
        await engine.generate(served.group(9, max_tokens=2))
        manifests.append(served.offer(adapters(seed=number + 1)))
        if number < NUM_SLOTS - 1:
            await load(engine, manifests[-1], "overlap")
    versions = [served.version, *(manifest.policy_version for manifest in manifests[:-1])]
    holders = "".join(rf"(?=.*slot \d has policy {version} \(2 requests under way)" for version in versions)
    end = rf"policy {versions[-1]} \(2 requests under way, served\).* rollout\.engine\.adapter_slots=3"
    with pytest.raises(WeightError, match=rf"no adapter slot is free: {holders}.*{end}"):
        await engine.stage_weights(manifests[-1])
    assert not any(task.done() for task in long)
    await engine.stage_weights(manifests[-1], 30.0)
    assert any(task.done() for task in long), "it has waited for a slot"
    for version, completions in zip(versions, await asyncio.gather(*long), strict=True):
        assert all(one_span(completion, version) for completion in completions)


async def test_an_owner_that_dies_while_its_adapters_are_fetched_leaves_what_is_served(
    served: Served, owner_socket: Path
) -> None:
    model = served.folder / "model"
    model.mkdir()
    save_file(adapters(seed=3), model / "model.safetensors")
    command = [sys.executable, str(SUPPORT / "weight_owner.py"), str(model)]
    arguments = [str(served.new_version()), str(owner_socket)]
    owner = subprocess.Popen([*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        manifest = WeightManifest.decode(bytes.fromhex(await asyncio.to_thread(owner.stdout.readline)))
        staging = asyncio.create_task(served.engine.stage_weights(manifest))
        assert await asyncio.to_thread(owner.stdout.readline) == "asked\n"
        (completion,) = await served.engine.generate(served.group(1, max_tokens=8))
        assert one_span(completion, served.version) and not staging.done()
    finally:
        owner.kill()
        await asyncio.to_thread(owner.wait)
    with pytest.raises(WeightError, match="the process that owns the weights has ended"):
        await staging
    await served.assert_serves()


async def test_adapters_whose_canary_differs_are_refused_before_anybody_samples_from_them(served: Served) -> None:
    """And the version before is put back from its slot, of which its owner is gone."""
    bench = Bench(served.engine, served.folder, canary_first=True)
    offered = await offer_to(bench, served, halved(adapters()), HALVED)
    assert (await bench.serve(offered)).error == ""
    close_owners()
    wrong = await offer_to(bench, served, adapters(seed=4), HALVED)
    group = served.group(2, num_samples=2, max_tokens=120)
    under_way = asyncio.create_task(served.engine.generate(group))
    await served.engine.generate(served.group(1, max_tokens=4))
    refused = await bench.serve(wrong)
    assert f"policy {wrong.policy_version} is refused: a log-probability of the canary" in refused.error
    assert f"policy {offered.policy_version} is served on" in refused.error and refused.canary_gap > 1
    assert all(one_span(completion, offered.policy_version) for completion in await under_way)
    await served.assert_serves(HALVED)


async def offer_to(bench: Bench, served: Served, tensors: Mapping[str, np.ndarray], variant: str) -> m.PolicyUpdate:
    """An update whose canary says that these adapters are those of a variant."""
    manifest = served.offer(tensors)
    ref = await bench.blobs.put("policy", "weight_manifest", manifest.encode())
    logprobs = served.references[f"{variant}.logprobs"][0].tolist()
    return policy_update(manifest.policy_version, ref, m.Canary(tokens=served.tokens[0], logprobs=logprobs))
