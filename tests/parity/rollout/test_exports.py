"""What the trainer exports is what vLLM loads, in one file or in shards, and scores as the trainer does."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from exports import make_exports

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_exports(tmp_path_factory.mktemp("exports"))


@pytest.mark.parametrize(("name", "kind"), [("tiny-beam", "sharded"), ("tiny-qwen3-moe", "whole")])
async def test_an_engine_gives_the_trainer_s_logprobs(exports: Path, start, name: str, kind: str) -> None:
    trained = load_file(exports / name / "scored.safetensors")
    async with start(exports / name / kind) as engine:
        scored = [await engine.score(tokens.tolist()) for tokens in trained["tokens"]]
    assert np.abs(np.array(scored) - trained["logprobs"]).max() < TOLERANCE
