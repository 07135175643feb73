"""Real engines on randomised tiny models, each started once for all tests of a model.

Everything runs in one event loop, that of the session: an engine belongs to the loop that started it.
"""

import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
from safetensors.numpy import load_file

from beamline.models import tiny
from beamline.protocol.config import EngineSection
from beamline.rollout import environment
from beamline.rollout.engine import Engine

REFERENCES = Path(__file__).parents[1] / "references"
SEED, OTHER_SEED = 7, 8
"""Weights of the references, and others of the same shape."""

MAX_MODEL_TOKENS = 512
# Prompts of 96 tokens arrive in chunks of at most 64, mixed with decoding, across cached blocks of 32.
ENGINE = EngineSection(kv_cache_mib=64, max_num_seqs=32, max_num_batched_tokens=64, block_size=32)

environment.prepare(num_threads=1)


@dataclass(frozen=True)
class Model:
    """A tiny model, what transformers makes of it, and a second policy for it."""

    name: str
    path: Path
    other_path: Path
    reference: dict[str, np.ndarray]

    def tensors(self, *, other: bool = False) -> dict[str, np.ndarray]:
        return load_file((self.other_path if other else self.path) / "model.safetensors")


@pytest.fixture(scope="session", params=["tiny-beam", "tiny-qwen3-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    paths = {seed: tmp_path_factory.mktemp(f"{request.param}-{seed}") for seed in (SEED, OTHER_SEED)}
    for seed, path in paths.items():
        tiny.build(tiny.SPECS[request.param], path, seed=seed, randomise=True)
    reference = load_file(REFERENCES / f"{request.param}.safetensors")
    return Model(request.param, paths[SEED], paths[OTHER_SEED], reference)


@pytest.fixture(scope="session")
def start() -> Callable[[Path], Awaitable[Engine]]:
    """Starts an engine on the weights of a directory."""
    from beamline.rollout.vllm_engine import VllmEngine

    return partial(VllmEngine.start, dtype="float32", max_model_tokens=MAX_MODEL_TOKENS, config=ENGINE)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(model: Model, start: Callable[[Path], Awaitable[Engine]]) -> AsyncIterator[Engine]:
    """Serves the reference weights as policy 0. A test that loads others puts these back."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    running = await start(model.path)
    children = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert children, "the engine core is a process of its own"
    yield running
    await running.close()
    gc.collect()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, f"still running after close: {alive}"
