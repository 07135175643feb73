"""Adapters as files, read by vLLM's own reader, which no part of the engine uses: any other reader gets them right."""

from pathlib import Path

import numpy as np
import pytest
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from beamline.models import tiny
from beamline.protocol.adapter import Adapter, adapters_of
from beamline.runtime.adapter_files import AdapterTensor, write_adapters
from lora_variants import VARIANTS
from made_adapters import made

SPEC = tiny.TINY_BEAM


@pytest.fixture(params=VARIANTS)
def adapters(request: pytest.FixtureRequest) -> list[Adapter]:
    return adapters_of(dict(SPEC.shapes()), VARIANTS[request.param], SPEC.num_experts_per_tok)


def read(directory: Path, adapters: list[Adapter], rank_and_alpha_alone: bool) -> LoRAModel:
    helper = PEFTHelper.from_local_dir(str(directory), None)
    if rank_and_alpha_alone:
        helper.rank_pattern, helper.alpha_pattern = {}, {}
    # Experts' modules go by their names from "experts" on.
    names = [adapter.module for adapter in adapters]
    expected = {name[name.find("experts") :] if ".experts." in name else name.rpartition(".")[2] for name in names}
    return LoRAModel.from_local_checkpoint(str(directory), expected, helper, lora_model_id=1, device="cpu")


@pytest.mark.parametrize("rank_and_alpha_alone", [False, True])
def test_vllms_own_reader_gets_every_product(adapters: list[Adapter], tmp_path: Path, rank_and_alpha_alone: bool):
    tensors = made(adapters)
    order = [name for adapter in adapters for name in adapter.shapes]
    stored = [AdapterTensor(name=name, dtype="float32", values=tensors[name]) for name in order]
    write_adapters(tmp_path, adapters, tmp_path, stored)
    found = read(tmp_path, adapters, rank_and_alpha_alone).loras
    assert found.keys() == {adapter.module for adapter in adapters}
    for adapter in adapters:
        one = found[adapter.module]
        assert one.lora_a is not None and one.lora_b is not None
        product = one.scaling * one.lora_b.double().numpy() @ one.lora_a.double().numpy()
        expected = adapter.scale * tensors[adapter.b].astype(np.float64) @ tensors[adapter.a].astype(np.float64)
        np.testing.assert_allclose(product, expected, rtol=1e-12, err_msg=adapter.module)
