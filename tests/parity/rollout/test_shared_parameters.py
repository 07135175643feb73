"""Parameters that are views of the trainer's memory: the same policy to the bit, and nothing is copied."""

import re
from pathlib import Path

import numpy as np
import pytest

from beamline.protocol.blobs import VersionSpan
from beamline.protocol.errors import WeightError
from rollout_messages import damage, export, prompt_group, readers_are
from tiny_engines import load, routes_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

ORDER = {"q_proj": "0", "k_proj": "1", "v_proj": "2", "gate_proj": "3", "up_proj": "4", "down_proj": "5"}


def as_an_engine_has_them(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What makes up one parameter comes together: q, k, v; gate and up of each expert; all that is down."""

    def place(name: str) -> tuple[str, int, str]:
        part = next((part for part in ORDER if part in name), "")
        expert = re.search(r"experts\.(\d+)\.", name)
        prefix = (
            name.split(".experts.", maxsplit=1)[0] + ".experts" if expert else name.replace(part, "") if part else name
        )
        if expert and part == "down_proj":
            prefix += ".down"
        return prefix, int(expert[1]) if expert else 0, ORDER.get(part, name)

    return {name: tensors[name] for name in sorted(tensors, key=place)}


async def scores(engine, model) -> np.ndarray:
    return np.array([await engine.score(tokens.tolist()) for tokens in model.reference["tokens"]])


async def test_policies_are_flipped_without_a_copy(start, engine, model, tmp_path: Path) -> None:
    own, other = (as_an_engine_has_them(model.tensors(other=which)) for which in (False, True))
    prompt = model.reference["tokens"][0][:64].tolist()
    group = prompt_group(prompt, seeds=[1, 2, 3], max_tokens=24)
    async with start(
        model.path, worker="loaded_weights.WatchedWorker", shared_parameters=True, kv_cache_mib=16
    ) as plain:
        before = await scores(plain, model)
        assert np.abs(before - model.reference["logprobs"]).max() < 1e-4
        for mine, theirs in zip(await plain.generate(group), await engine.generate(group), strict=True):
            assert mine.tokens == theirs.tokens and np.array_equal(routes_of(mine), routes_of(theirs))
        manifests = [export(tmp_path, 0, own), export(tmp_path, 1, other)]
        for _ in range(3):
            await load(plain, manifests[1])
            assert np.abs(await scores(plain, model) - before).max() > 1
            await load(plain, manifests[0])
            assert np.array_equal(await scores(plain, model), before)
            assert await plain._call("unshared_parameters") == [[]]
            await readers_are(1)  # the policy that is served is held
        damaged = export(tmp_path, 2, other)
        damage(damaged, "model.norm.weight")
        with pytest.raises(WeightError, match="checksum"):
            await plain.stage_weights(damaged)
        # Tensors in another order cannot be parameters as they lie; they are copied, and the segment is let go.
        await load(plain, export(tmp_path, 3, dict(reversed(other.items()))))
        assert len((await plain._call("unshared_parameters"))[0]) > 3
        await load(plain, export(tmp_path, 4, own))
        assert np.array_equal(await scores(plain, model), before)
        assert (await plain.generate(group))[0].version_spans == [VersionSpan(4, 0, 24)]
