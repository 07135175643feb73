"""Every layout of the trainer into every layout of the engine: the same bits, the same log-probabilities."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from beamline.protocol.messages import Canary
from beamline.rollout.engine import Engine
from beamline.weights.manifest import WeightManifest
from loaded_weights import assert_loads_bit_for_bit
from rollout_messages import prompt_group
from tiny_engines import load

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROOT = Path(__file__).parents[3]
TRAINER = ROOT / "services" / "trainer" / ".venv" / "bin" / "python"
PROGRAM = ROOT / "tests" / "support" / "export_layouts.py"
LAYOUTS = ("tp1", "tp2", "ep2", "pp2")
DEADLINE_S = 240


@pytest.fixture(scope="session")
def all_exports(models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a model: it and its other policy, as real trainers of all layouts export them, cut for two ranks."""
    into = tmp_path_factory.mktemp("exports")
    pairs = [part for model in models.values() for part in ("--models", model.name, model.path, model.other_path)]
    subprocess.run([TRAINER, PROGRAM, *pairs, "--into", into, "--cuts", "2"], check=True, timeout=DEADLINE_S)
    return into


@pytest.fixture(scope="session")
def exports(model, all_exports: Path) -> Path:
    return all_exports / model.name


def exported(exports: Path, layout: str, version: int) -> tuple[WeightManifest, Canary]:
    """A policy, and the log-probabilities of the trainer that exported it."""
    folder = exports / layout
    canary = msgspec.json.decode((folder / f"canary-{version}").read_bytes(), type=Canary)
    return WeightManifest.decode((folder / f"manifest-{version}").read_bytes()), canary


async def greedy(engine: Engine, tokens: Sequence[int]) -> list[int]:
    group = prompt_group(list(tokens)[:16], seeds=[0], max_tokens=24, temperature=0.0)
    (completion,) = await engine.generate(group)
    return completion.tokens


async def check(engine: Engine, model, exports: Path, layout: str) -> None:
    """Load the other policy and the model's own from a trainer; the engine must be where it was before."""
    answers: list[list[int]] = []
    for version in (1, 0):
        manifest, canary = exported(exports, layout, version)
        await assert_loads_bit_for_bit(engine, manifest, model.tensors(other=version == 1))
        await load(engine, manifest)
        scored = np.array(await engine.score(canary.tokens))
        assert np.abs(scored - canary.logprobs).max() < 1e-4
        answers.append(await greedy(engine, canary.tokens))
    assert answers[0] != answers[1], "the policies answer alike: nothing is shown"


@pytest.mark.parametrize("trainer", LAYOUTS)
async def test_into_one_rank(engine, model, exports: Path, trainer: str) -> None:
    await check(engine, model, exports, trainer)


@pytest.mark.parametrize("trainer", LAYOUTS)
async def test_into_two_ranks(ranks, model, exports: Path, trainer: str) -> None:
    await check(ranks, model, exports, trainer)


async def test_two_engines_of_different_layouts_follow_one_trainer(engine, ranks, model, exports: Path) -> None:
    for version in (1, 0, 1, 0):
        manifest, canary = exported(exports, "tp2", version)
        for one in (engine, ranks):
            await load(one, manifest)
        for one in (engine, ranks):
            assert np.abs(np.array(await one.score(canary.tokens)) - canary.logprobs).max() < 1e-4
        assert await greedy(engine, canary.tokens) == await greedy(ranks, canary.tokens)
