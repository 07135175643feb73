"""Later policies are copied to where the first one's tensors went: what vLLM's own loading gives, to the bit."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from beamline.rollout.needs_recorder import NeedsRecorder
from rollout_messages import export, prompt_group
from tiny_engines import assert_same, load


@pytest.mark.asyncio(loop_scope="session")
async def test_a_policy_is_the_one_that_vllm_loads_itself(engine, model, tmp_path: Path) -> None:
    group = prompt_group(model.reference["tokens"][0][:64].tolist(), seeds=[1, 2], max_tokens=8)
    policies = [export(tmp_path, version, model.tensors(other=version == 1)) for version in (0, 1)]
    assert await engine._call("left_to_vllm") == [[]], "every tensor is copied directly"
    found = []
    for is_direct in (False, True):
        await engine._call("load_directly", is_direct)
        await load(engine, policies[1])
        scores = [await engine.score(tokens.tolist()) for tokens in model.reference["tokens"]]
        found.append((scores, await engine.generate(group)))
        await load(engine, policies[0])
    assert np.array_equal(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])


class Model(nn.Module):
    """Modules whose loaders do what a record can follow, and others."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("copied", "turned", "added_to", "lower", "split", "joined"):
            module = nn.Module()
            module.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
            self.add_module(name, module)
        self.tied = nn.Module()
        self.tied.weight = self.copied.weight

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            into = self.get_submodule(name.split("-")[0]).weight.data
            match name:
                case "turned":
                    into.copy_(tensor.t())
                case "added_to":
                    into.copy_(tensor).add_(1)
                case "lower":
                    into[:2].copy_(tensor[2:])
                case "split-a" | "split-b":
                    into.narrow(0, 2 * (name == "split-b"), 2).copy_(tensor)
                case "joined":
                    into.copy_(tensor)
                    self.lower.weight.data[2:].copy_(tensor[:2] * 2)
                case _:
                    into.copy_(tensor)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = {"split-a": 2, "split-b": 2, "copied": 4, "turned": 4, "added_to": 4, "lower": 4, "joined": 4}
    return {name: torch.randn(rows, 4, generator=rng) for name, rows in shapes.items()}


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_what_copying_does_not_bring_about_is_left_to_the_loaders(is_symmetric: bool) -> None:
    """Also where the first policy happens not to show it, as a matrix that equals its transpose."""
    from beamline.rollout.direct_load import DirectLoad

    model, recorder, first = Model(), NeedsRecorder(), tensors(1)
    if is_symmetric:
        first["turned"] = first["turned"] + first["turned"].t()
    model.load(recorder.follow(first.items()))
    direct = DirectLoad(model, recorder.needs, first, torch.float32)
    assert direct.names == {"copied", "split-a", "split-b"}
    assert direct.left == {"turned", "added_to", "lower", "joined"}
    second, place = tensors(2), model.copied.weight.data_ptr()
    direct.load((name, second[name]) for name in sorted(direct.names, reverse=True))
    assert torch.equal(model.copied.weight, second["copied"]) and model.tied.weight.data_ptr() == place
    assert torch.equal(model.split.weight, torch.cat([second["split-a"], second["split-b"]]))
    assert torch.equal(model.added_to.weight, first["added_to"] + 1)
