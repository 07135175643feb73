"""Activating adapters: the canary comes first, and what is served beside them ends as it began."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from beamline.protocol.blobs import VersionSpan
from beamline.protocol.weights_config import WeightsSection
from beamline.rollout.activation import SLOT_SHARE, pause_of
from beamline.rollout.engine import Completion, Pause, Scored
from beamline.rollout.fake_engine import FakeEngine
from beamline.weights.manifest import WeightManifest
from rollout_bench import Bench, Turns, opened
from rollout_messages import prompt_group


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


class Told(FakeEngine):
    """Remembers what it was told, in order."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)  # pyright: ignore[reportArgumentType]
        self.told: list[str] = []

    async def stage_weights(self, manifest: WeightManifest, slot_wait_s: float = 0.0) -> int:
        self.told.append(f"stage {manifest.policy_version} within {slot_wait_s:g} s")
        return await super().stage_weights(manifest, slot_wait_s)

    async def activate_weights(self, pause: Pause = "keep") -> None:
        self.told.append(f"{pause} {self.staged}")
        await super().activate_weights(pause)

    async def score(self, tokens: Sequence[int], policy: Scored = "served") -> list[float]:
        self.told.append(f"score {policy}")
        return await super().score(tokens, policy)


def bench_of(engine: FakeEngine, folder: Path, pause: Pause = "overlap", deadline_s: float = 60.0) -> Bench:
    return Bench(engine, folder, pause=pause, deadline_s=deadline_s, canary_first=True)


def test_overlap_is_an_engine_s_word_too():
    assert pause_of(WeightsSection(pause="overlap")) == "overlap"


@pytest.mark.parametrize("pause", ["keep", "drain", "abort", "overlap"])
async def test_adapters_are_served_after_their_canary_agreed(folder: Path, pause: Pause):
    engine = Told()
    bench = bench_of(engine, folder, pause)
    assert (await bench.update(1)).error == "" and await bench.is_open()
    assert engine.told == [f"stage 1 within {60 * SLOT_SHARE:g} s", "score staged", f"{pause} 1"]


async def test_adapters_whose_canary_disagrees_are_never_served(folder: Path):
    engine = Told(drifted={1})
    bench = bench_of(engine, folder)
    await bench.update(0)
    engine.told.clear()
    refused = await bench.update(1)
    assert "policy 1 is refused: a log-probability of the canary differs" in refused.error
    assert "policy 0 is served on" in refused.error and not await bench.is_open()
    assert "overlap 1" not in engine.told and engine.policy_version == 0
    assert engine.told[-3:] == ["stage 0 within 0 s", "score staged", "overlap 0"]
    engine.drifted = {}
    assert (await bench.hear(opened(1, 2)))[-1].error == "" and engine.policy_version == 1  # pyright: ignore


async def sampled(bench: Bench, turns: Turns) -> Completion:
    """One sample, under way while the next policy is served."""
    sampling = asyncio.create_task(bench.engine.generate(prompt_group([4], seeds=[3], max_tokens=64)))
    (await turns.next()).set_result(None)
    token = await turns.next()
    assert (await bench.update(1)).error == ""
    token.set_result(None)
    (completion,) = await turns.finish(sampling)
    return completion


async def test_samples_beside_new_adapters_end_with_their_own(folder: Path):
    turns = Turns()
    bench = bench_of(FakeEngine(wait=turns.wait), folder)
    await bench.update(0)
    completion = await sampled(bench, turns)
    assert completion.version_spans == [VersionSpan(0, 0, len(completion.tokens))]
    (after,) = await turns.finish(asyncio.create_task(bench.engine.generate(prompt_group([4], seeds=[3]))))
    assert after.version_spans == [VersionSpan(1, 0, len(after.tokens))]


async def test_samples_that_are_kept_go_on_under_new_adapters(folder: Path):
    turns = Turns()
    bench = bench_of(FakeEngine(wait=turns.wait), folder, "keep")
    await bench.update(0)
    completion = await sampled(bench, turns)
    assert [span.policy_version for span in completion.version_spans] == [0, 1]
