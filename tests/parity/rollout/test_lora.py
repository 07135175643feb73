"""Adapters in slots, written from memory, against transformers with the same adapters merged into the weights.

Every kind of adapters goes into the slots of one engine, whose slots are those of the largest.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load_file

from beamline.protocol.adapter import adapter_shapes, adapters_of
from beamline.protocol.config import EngineSection
from beamline.protocol.errors import ConfigError
from beamline.protocol.lora_config import LoraSection
from beamline.rollout import checkpoint
from beamline.rollout.engine import Engine
from lora_variants import ALL, VARIANTS
from rollout_messages import prompt_group
from tiny_engines import ENGINE, ROUNDING, routes_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

REFERENCES = Path(__file__).parents[1] / "references"
TOLERANCE = 1e-4
FAR = 0.05
"""From the reference, at the least, with a fault."""
_FAULTS = [
    ("expert_scale_off_by_top_k", "norm-alpha1"),
    ("experts_permuted", "full-alpha1"),
    ("one_a_for_q_k_and_v", "split-norm-alpha2"),
]
FAULTS = {"tiny-beam": [*_FAULTS, ("gate_left_out", "full-alpha2")], "tiny-qwen3-moe": _FAULTS}
"""Each with the variant that is spoilt, by model: Qwen3-MoE has no output gate."""
STARTED = VARIANTS["full-alpha1"]
NUM_SLOTS = 3
BINDINGS = [[slot + 1, slot, slot] for slot in range(NUM_SLOTS)]
"""Id, slot and version."""
SERVED = [
    ("tiny-beam", ""),
    ("tiny-beam", "tensor_parallel"),
    ("tiny-beam", "pipeline_parallel"),
    ("tiny-qwen3-moe", ""),
    ("tiny-qwen3-moe", "tensor_parallel"),
    ("tiny-qwen3-moe", "pipeline_parallel"),
]


@dataclass
class Served:
    """An engine with slots, and what is expected of it."""

    engine: Engine
    model: Any
    chosen: Any
    references: dict[str, np.ndarray]
    config: EngineSection

    async def call(self, method: str, *args: Any) -> list[Any]:
        from slots_worker import call

        return await call(self.engine, method, *args)

    async def write(self, slot: int, variant: str, **changes: Any) -> None:
        """Put adapters into a slot; prefixes that others in it have left in the cache are forgotten."""
        await self.call("write_variant", slot, variant, changes.get("seed", 0), changes.get("fault", ""))
        await self.engine.forget_prefixes()

    async def score(self, id: int) -> np.ndarray:
        """Log-probabilities [S, T - 1] of the reference's texts, asked for at once, beside whatever else is."""
        from slots_worker import prompt_logprobs

        with self.chosen.choose(id):
            asked = [prompt_logprobs(self.engine, tokens.tolist()) for tokens in self.references["tokens"]]
            return np.array(await asyncio.gather(*asked))

    async def error(self, id: int, variant: str) -> float:
        """Of what is scored with an id, against a variant's reference, or the model's own where none is named."""
        expected = self.references[f"{variant}.logprobs"] if variant else self.model.reference["logprobs"]
        return float(np.abs(await self.score(id) - expected).max())


def planned(path: Path, lora: LoraSection, config: EngineSection) -> Any:
    from beamline.rollout.lora.budget import plan_slots  # imports vLLM

    return plan_slots(path, "float32", lora, config)


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=SERVED, ids="-".join)
async def served(request: pytest.FixtureRequest, models: dict[str, Any], start: Any) -> AsyncIterator[Served]:
    from slots_worker import ChosenAdapters

    name, layout = request.param
    changes = {"adapter_slots": NUM_SLOTS, "max_num_batched_tokens": 768, **({layout: 2} if layout else {})}
    async with start(models[name].path, worker="slots_worker.SlotsWorker", lora=STARTED, **changes) as engine:
        chosen, config = ChosenAdapters(), msgspec.structs.replace(ENGINE, **changes)
        engine.__setattr__("_policies", chosen)
        served = Served(engine, models[name], chosen, load_file(REFERENCES / f"{name}-lora.safetensors"), config)
        await served.call("bind_ids", BINDINGS)
        yield served


@pytest.mark.parametrize("variant", ALL)
async def test_logprobs_and_routes_equal_the_merged_model(served: Served, variant: str) -> None:
    await served.write(1, variant)
    assert await served.error(2, variant) < TOLERANCE
    with served.chosen.choose(2):
        prompts = [prompt_group(tokens.tolist(), seeds=[1], max_tokens=1) for tokens in served.references["tokens"]]
        sampled = await asyncio.gather(*map(served.engine.generate, prompts))
    for (completion,), routes in zip(sampled, served.references[f"{variant}.routed_experts"], strict=True):
        assert np.array_equal(routes_of(completion), np.sort(routes, axis=-1))


async def test_every_request_of_a_mixed_batch_has_its_own_adapters(served: Served) -> None:
    """Three slots and none, prefilled in one step and decoded together."""
    variants = ["full-alpha1", "norm-alpha2", "split-norm-alpha2"]
    for slot, variant in enumerate(variants):
        await served.write(slot, variant)
    asked = [(0, ""), *enumerate(variants, start=1)]
    errors = await asyncio.gather(*(asyncio.create_task(served.error(*one)) for one in asked * 2))
    assert max(errors) < TOLERANCE, errors
    mixed = [-1, 0, 1, 2]
    assert all(found == mixed for found in await served.call("most_mixed"))

    prompt, asked = served.references["tokens"][0][:20].tolist(), []
    for id in (2, 0, 3, 1, 0, 2):
        with served.chosen.choose(id):
            group = prompt_group(prompt, seeds=[len(asked)], max_tokens=12)
            asked.append((id, asyncio.create_task(served.engine.generate(group))))
    for id, sampling in asked:
        (completion,) = await sampling
        with served.chosen.choose(id):
            scored = await served.engine.score(prompt + completion.tokens)
        assert np.abs(np.array(scored[len(prompt) - 1 :]) - completion.logprobs).max() < TOLERANCE


async def test_an_id_reads_the_slot_it_is_bound_to_and_no_other_slot_is_touched(served: Served) -> None:
    await served.write(0, "full-alpha1")
    first = await served.score(1)
    await served.write(1, "norm-alpha1", seed=5)
    assert np.abs(await served.score(1) - first).max() < ROUNDING, "slot 0 is as it was"
    second = await served.score(2)
    assert np.abs(second - first).max() > FAR
    try:
        await served.call("bind_ids", [[1, 1, 0], [7, 1, 1], [3, 2, 2]])
        for id in (1, 7):
            assert np.abs(await served.score(id) - second).max() < ROUNDING, "both read slot 1"
        await served.call("clear_slot", 1)
        assert await served.error(7, "") < TOLERANCE
    finally:
        await served.call("bind_ids", BINDINGS)


async def test_ranks_need_each_element_once_or_share_it_and_nothing_else(served: Served) -> None:
    shape = checkpoint.routing_shape(served.model.path)
    assert shape is not None
    shapes = adapter_shapes(adapters_of(checkpoint.tensor_shapes(served.model.path), STARTED, shape.top_k))
    ranks = await served.call("needed")
    held = {name: np.zeros(size, int) for name, size in shapes.items()}
    for needs in ranks:
        for name, boxes in needs.items():
            for box in boxes:
                held[name][tuple(slice(*edges) for edges in box)] += 1
    assert all(mask.all() for mask in held.values()), "all of every adapter is on some rank"
    split = {name for name, mask in held.items() if mask.max() == 1}
    if len(ranks) == 1 or ranks[0].keys() != ranks[1].keys():
        assert split == held.keys(), "of one rank, or of one stage"
    else:
        row_parallel = ("o_proj", "down_proj")
        assert split == {name for name in held if ("lora_A" in name) == (name.split(".")[-3] in row_parallel)}


async def test_only_targeted_modules_have_slots(served: Served) -> None:
    found = {name.split(".", 3)[3] for rank in await served.call("wrapped") for name in rank}
    dense = (
        {"self_attn.output_gate", "mlp.gate_up_proj", "mlp.down_proj"} if served.model.name == "tiny-beam" else set()
    )
    assert found == {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts"} | dense


async def test_slots_take_what_was_planned_and_leave_the_rest_to_the_cache(served: Served) -> None:
    """Planned is the rank that has most to hold."""
    plan = planned(served.model.path, STARTED, served.config)
    allocated = await served.call("slot_bytes")
    assert max((dense + expert, expert) for dense, expert in allocated) == (plan.num_bytes, plan.expert_bytes)
    left = (served.config.kv_cache_mib << 20) - plan.num_bytes
    for num_blocks, block_bytes in await served.call("cache_blocks"):
        assert num_blocks * block_bytes <= left
    if len(allocated) == 1:
        assert num_blocks == left // block_bytes


async def test_smaller_expert_slots_leave_more_blocks(models: dict[str, Any], start: Any) -> None:
    """Slots of rank 2, which experts have when their rank is divided by the four that a token reads."""
    path, config = models["tiny-beam"].path, msgspec.structs.replace(ENGINE, adapter_slots=NUM_SLOTS)
    full, own = (planned(path, lora, config) for lora in (STARTED, VARIANTS["norm-alpha1"]))
    assert full.expert_rank == 4 * own.expert_rank and full.expert_bytes == 4 * own.expert_bytes
    assert full.dense_bytes == own.dense_bytes
    worker = "slots_worker.SlotsWorker"
    async with start(path, worker=worker, lora=own.section, adapter_slots=NUM_SLOTS) as engine:
        from slots_worker import call

        assert await call(engine, "slot_bytes") == [[own.dense_bytes, own.expert_bytes]]
        ((num_blocks, block_bytes),) = await call(engine, "cache_blocks")
    before = full.kv_cache_bytes(config) // block_bytes
    print(f"experts' slots of {full.expert_bytes} and {own.expert_bytes} bytes: {before} and {num_blocks} blocks")
    assert num_blocks - before == own.kv_cache_bytes(config) // block_bytes - before > 0


@pytest.mark.parametrize(
    ("lora", "changes", "words"),
    [
        (STARTED, {"max_expert_lora_rank": 4}, "max_expert_lora_rank=4 is less than the rank 8 .* set it to 8"),
        (STARTED, {"kv_cache_mib": 3}, r"kv_cache_mib=3 is all taken by 3 adapter slots .* at rank 8.* set it above 4"),
        (LoraSection(rank=520), {}, "rank=520: vLLM serves adapters up to rank 512"),
        (LoraSection(rank=6, normalize_moe_lora=True), {}, "rank=6 is no multiple of .*num_experts_per_tok=4"),
    ],
)
async def test_slots_that_do_not_fit_are_refused_with_numbers(
    models: dict[str, Any], lora: LoraSection, changes: dict[str, int], words: str
) -> None:
    config = msgspec.structs.replace(ENGINE, adapter_slots=NUM_SLOTS, **changes)
    with pytest.raises(ConfigError, match=words):
        planned(models["tiny-beam"].path, lora, config).kv_cache_bytes(config)


async def test_slots_have_the_smallest_rank_that_vllm_offers_and_the_experts_own(models: dict[str, Any]) -> None:
    lora = LoraSection(rank=24, normalize_moe_lora=True)
    plan = planned(models["tiny-beam"].path, lora, ENGINE)
    assert (plan.dense_rank, plan.expert_rank) == (32, 6)


async def test_a_planted_fault_is_seen(served: Served) -> None:
    for fault, variant in FAULTS[served.model.name]:
        await served.write(0, variant)
        assert await served.error(1, variant) < TOLERANCE, fault
        await served.write(0, variant, fault=fault)
        assert await served.error(1, variant) > FAR, fault
