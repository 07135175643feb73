"""Real engines on randomised tiny models, each started once a layout for all tests of a model.

Everything runs in one event loop, that of the session: an engine belongs to the loop that started it.
"""

import gc
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio
from safetensors.numpy import load_file

from beamline.models import tiny
from beamline.protocol.lora_config import LoraSection
from beamline.rollout import environment
from beamline.rollout.engine import Engine
from rollout_messages import close_owners
from served_adapters import LORA, MODEL, SETTINGS, WORKER, Served, serving
from shared_memory import segments
from tiny_engines import ENGINE, MAX_MODEL_TOKENS

REFERENCES = Path(__file__).parents[1] / "references"
MODELS = ("tiny-beam", "tiny-qwen3-moe")
SEED, OTHER_SEED = 7, 8
"""Weights of the references, and others of the same shape."""

environment.prepare(num_threads=1)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """One model after the other, and its layouts in turn: pytest's own order starts every engine twice and more."""

    def key(item: pytest.Function) -> tuple[str, str]:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        return parameters.get("model", ""), parameters.get("layout", "")

    items.sort(key=key)


@dataclass(frozen=True)
class Model:
    """A tiny model, what transformers makes of it, and a second policy for it."""

    name: str
    path: Path
    other_path: Path
    reference: dict[str, np.ndarray]

    def tensors(self, *, other: bool = False) -> dict[str, np.ndarray]:
        return load_file((self.other_path if other else self.path) / "model.safetensors")


@pytest.fixture
def owner_socket() -> Iterator[Path]:
    """A path that nobody else binds, in a folder of its own: in a test's own folder it is too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="beamline-") as folder:
        yield Path(folder) / "owner.sock"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """By name; `model` comes and goes with its engines."""
    return {name: made(name, tmp_path_factory) for name in MODELS}


@pytest.fixture(scope="session", params=MODELS)
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    return models[request.param]


def made(name: str, folders: pytest.TempPathFactory) -> Model:
    paths = {seed: folders.mktemp(f"{name}-{seed}") for seed in (SEED, OTHER_SEED)}
    for seed, path in paths.items():
        tiny.build(tiny.SPECS[name], path, seed=seed, randomise=True)
    return Model(name, paths[SEED], paths[OTHER_SEED], load_file(REFERENCES / f"{name}.safetensors"))


def ranks_files() -> set[Path]:
    """By which vLLM's ranks met, where all users' temporary files lie."""
    return set(Path(tempfile.gettempdir()).glob("vllm_dist_*"))


type Start = Callable[..., AbstractAsyncContextManager[Engine]]


@pytest.fixture(scope="session")
def start() -> Start:
    """Starts an engine on the weights of a directory, with changes to `ENGINE` by name; nothing may be left of it.

    `worker` names a class for its ranks that can do more than the engine's own.
    """

    @asynccontextmanager
    async def running(
        path: Path,
        dtype: str = "float32",
        worker: str | None = None,
        lora: LoraSection | None = None,
        **changes: Any,
    ) -> AsyncIterator[Engine]:
        from beamline.rollout import vllm_engine, vllm_settings

        config = msgspec.structs.replace(ENGINE, **changes)
        before, shared, files = set(psutil.Process().children(recursive=True)), segments(), ranks_files()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm_settings, "WORKER", worker or vllm_settings.WORKER)
            engine = await vllm_engine.VllmEngine.start(
                path, dtype=dtype, max_model_tokens=MAX_MODEL_TOKENS, config=config, lora=lora
            )
        started, engine_folder = set(psutil.Process().children(recursive=True)) - before, engine._scratch.path
        assert any(path.is_socket() for path in engine_folder.iterdir()) and engine_folder.stat().st_mode & 0o77 == 0
        num_ranks = config.tensor_parallel * config.pipeline_parallel
        assert len(started) >= (1 if num_ranks == 1 else 1 + num_ranks), "engine core and ranks are processes"
        try:
            yield engine
        finally:
            await engine.close()
            gc.collect()
        _, alive = psutil.wait_procs(list(started), timeout=20)
        assert not alive, f"still running after close: {alive}"
        left = {name for name in segments() - shared if name.startswith("vllm")}
        assert not left, f"still in shared memory after close: {left}"
        assert not engine_folder.exists() and ranks_files() <= files

    return running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(model: Model, start: Start) -> AsyncIterator[Engine]:
    """Serves the reference weights as policy 0. A test that loads others puts these back."""
    async with start(model.path, worker="loaded_weights.WatchedWorker") as running:
        yield running


@pytest.fixture(scope="session", params=["tensor_parallel", "pipeline_parallel"])
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def ranks(layout: str, model: Model, start: Start) -> AsyncIterator[Engine]:
    """An engine of two ranks that can lose rows, with the reference weights as policy 0."""
    async with start(model.path, worker="rollout_lossy_worker.LossyWorker", **{layout: 2}) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def adapted(models: dict[str, Model], start: Start) -> AsyncIterator[Engine]:
    """An engine for adapters."""
    async with start(models[MODEL].path, worker=WORKER, lora=LORA, **SETTINGS) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def served(adapted: Engine, tmp_path: Path) -> Served:
    """It serves those of a reference."""
    return await serving(adapted, tmp_path)


@pytest.fixture(autouse=True)
def exported_weights() -> Iterator[None]:
    """Weights that a test exports are gone after it."""
    yield
    close_owners()
