"""How the trainer keeps adapters: a checkpoint has them and the identity of their base, an export the merged model."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from beamline.protocol.config import RunConfig
from beamline.protocol.errors import WeightError
from beamline.runtime import checkpoints
from beamline.runtime.adapter_files import AdapterFiles
from beamline.runtime.adapter_merge import adapters_in
from beamline.runtime.base_identity import BaseIdentity
from beamline.trainer.resume import first_step
from lora_variants import ALL
from made_adapters import made, merged
from trainer_bench import Bench

LORA = ALL["norm-alpha2"]
WEIGHTS = "model.safetensors"


@pytest.fixture
async def bench(tmp_path: Path):
    with ThreadPoolExecutor(1) as thread:
        bench = Bench(tmp_path, thread, lora=LORA)
        await bench.worker.saver.start()
        await bench.worker.publish_first()
        yield bench
        await bench.worker.saver.finish()
        bench.rank.close()


async def test_a_checkpoint_holds_adapters_and_says_of_what(bench: Bench):
    await bench.train(1)
    saved = await bench.keep(1)
    folder = Path(saved.path)
    assert (saved.error, checkpoints.damage(folder, model=bench.model_dir)) == ("", "")
    assert not (folder / "policy").exists()
    state = checkpoints.trainer_state(folder)
    assert state is not None and (state.base, state.lora) == (BaseIdentity.of(bench.model_dir), LORA)
    adapters = adapters_in(bench.model_dir, LORA)
    files, expected = AdapterFiles(folder / "adapter"), made(adapters, seed=bench.policy.num_updates)
    files.check(adapters)
    assert all(np.array_equal(files.read(name), values) for name, values in expected.items())


@pytest.mark.parametrize("checkpoint", [True, False])
async def test_an_export_has_the_adapters_and_the_merged_model(bench: Bench, tmp_path: Path, checkpoint: bool):
    await bench.train(1)
    saved = await bench.keep(1, checkpoint=checkpoint, export=True)
    export = tmp_path / "exports" / "global_step_1"
    assert (saved.error, saved.export_path) == ("", str(export / "merged"))
    assert sorted(path.name for path in export.iterdir()) == ["adapter", "merged"]
    kept = bench.root / "global_step_1" / "adapter" / "adapter_model.safetensors"
    assert not checkpoint or os.path.samefile(kept, export / "adapter" / "adapter_model.safetensors")
    adapters, base = adapters_in(bench.model_dir, LORA), load_file(bench.model_dir / WEIGHTS)
    expected = merged(base, adapters, made(adapters, seed=bench.policy.num_updates))
    found = load_file(export / "merged" / WEIGHTS)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], values) for name, values in expected.items())
    beside = sorted(path.name for path in bench.model_dir.iterdir())
    assert sorted(path.name for path in (export / "merged").iterdir()) == beside


@pytest.mark.parametrize(
    ("is_there", "expected"),
    [(False, "has no *.safetensors file"), (True, "has other weights than when the run began")],
)
async def test_a_base_that_has_changed_loses_the_export_and_not_the_checkpoint(
    bench: Bench, tmp_path: Path, is_there: bool, expected: str
):
    await bench.train(1)
    assert (await bench.keep(1)).error == ""
    weights = bench.model_dir / WEIGHTS
    if is_there:
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    else:
        weights.unlink()
    saved = await bench.keep(1, checkpoint=False, export=True)
    assert (
        f"the export of step 1 in {tmp_path / 'exports'} came to nothing: {bench.model_dir} {expected}" in saved.error
    )
    assert list((tmp_path / "exports").iterdir()) == []
    assert checkpoints.damage(bench.root / "global_step_1") == ""


async def test_a_trainer_goes_on_from_adapters_of_its_own_kind_and_base_alone(bench: Bench, tmp_path: Path):
    await bench.train(1)
    folder = Path((await bench.keep(1)).path)

    def config_of(model_dir: Path, **lora: object) -> RunConfig:
        model = {"path": str(model_dir), "lora": {**msgspec.to_builtins(LORA), **lora}}
        trainer = {"resume_mode": "from_path", "resume_path": str(folder)}
        return msgspec.convert({"run": {"name": "next"}, "model": model, "trainer": trainer}, RunConfig)

    assert first_step(config_of(bench.model_dir)) == first_step(config_of(bench.model_dir, dropout=0.5)) == 1
    with pytest.raises(WeightError, match=r"holds adapters with model\.lora\.rank=8, not 4"):
        first_step(config_of(bench.model_dir, rank=4))
    with pytest.raises(WeightError, match=r"holds adapters, and model\.lora\.rank=0 trains all weights"):
        first_step(config_of(bench.model_dir, rank=0))
    shutil.copytree(bench.model_dir, tmp_path / "other")
    content = bytearray((tmp_path / "other" / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (tmp_path / "other" / WEIGHTS).write_bytes(content)
    expected = rf"adapters were trained on {bench.model_dir} .* and {tmp_path / 'other'} has other weights"
    with pytest.raises(WeightError, match=expected):
        first_step(config_of(tmp_path / "other"))
