"""`beamline checkpoints`, `verify`, `export` and a resumed run, on checkpoints of adapters."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

from adapter_checkpoints import adapters_with, make_adapter_checkpoint
from beamline.coordinator.launch.resume import find_origin
from beamline.models import tiny
from beamline.protocol.config import RunConfig, RunSection
from beamline.protocol.errors import ConfigError, WeightError
from beamline.protocol.lora_config import LoraSection
from beamline.runtime.checkpoint_manifest import MANIFEST, manifest_of
from beamline.runtime.checkpoints import damage, resolve
from beamline.runtime.export import export_merged
from beamline.runtime.run_files import write_config
from command_line import beamline
from full_disk import APART, MOUNT, can_mount
from lora_variants import ALL
from made_adapters import made, merged
from made_checkpoints import make_checkpoint

BEAM, LORA = "tiny-beam", ALL["norm-alpha2"]
ADAPTERS = adapters_with(BEAM, LORA)
TENSORS = made(ADAPTERS)
GATE = "model.layers.0.self_attn.gate_proj"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny.build(tiny.SPECS[BEAM], tmp_path / "base", seed=7, randomise=True)
    return tmp_path / "base"


@pytest.fixture
def folder(tmp_path: Path, base: Path) -> Path:
    """The second checkpoint of a run."""
    run = tmp_path / "runs" / "demo"
    write_config(run, RunConfig(run=RunSection(name="demo", dir=str(tmp_path / "runs"))))
    (run / "launcher.lock").touch()
    for step in (1, 2):
        made_folder = make_adapter_checkpoint(run / "checkpoints", step, base, BEAM, LORA, TENSORS)
    return made_folder


def test_the_list_names_adapters_and_their_model(folder: Path, base: Path, capsys: pytest.CaptureFixture[str]):
    _, out, _ = beamline(capsys, "checkpoints", "demo", "--runs", folder.parents[2])
    row = " ".join(out.splitlines()[1].split())
    assert row.startswith(f"2 latest adapter of rank 8 on {base} ") and row.endswith(" device yes no")
    _, out, _ = beamline(capsys, "checkpoints", folder.parents[1], "--json")
    first = json.loads(out)["checkpoints"][0]
    assert (first["holds"], first["base"], first["lora_rank"]) == ("adapter", str(base), 8)


def test_verify_reads_adapters_too(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert beamline(capsys, "verify", folder)[0] == 0
    weights = folder / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    code, out, _ = beamline(capsys, "verify", folder)
    assert code == 1 and "damaged: adapter/adapter_model.safetensors is not what its manifest.json says" in out


def test_export_copies_the_adapters_in_pefts_format(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = beamline(capsys, "export", folder.parent, tmp_path / "mine")
    assert (code, out.strip()) == (0, str(tmp_path / "mine"))
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == files
    assert all((tmp_path / "mine" / file).read_bytes() == (folder / "adapter" / file).read_bytes() for file in files)


def test_export_merges(folder: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = beamline(capsys, "export", folder.parent / "latest", tmp_path / "model", "--merge")
    assert (code, out.strip()) == (0, str(tmp_path / "model"))
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == sorted(path.name for path in base.iterdir())
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert (tmp_path / "model" / "config.json").read_bytes() == (base / "config.json").read_bytes()
    expected = merged(load_file(base / "model.safetensors"), ADAPTERS, TENSORS)
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], values) for name, values in expected.items())
    code, _, err = beamline(capsys, "export", folder, tmp_path / "model", "--merge")
    assert code == 2 and "is not empty: export into a new directory" in err


def test_a_model_that_was_moved_or_replaced(
    folder: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    base.rename(tmp_path / "moved")
    code, _, err = beamline(capsys, "export", folder, tmp_path / "model", "--merge")
    assert code == 2 and f"{base} is not there, and the adapters of checkpoint {folder} were trained on {base}" in err
    assert "--base DIR" in err
    assert beamline(capsys, "export", folder, tmp_path / "model", "--merge", "--base", tmp_path / "moved")[0] == 0
    tiny.build(tiny.SPECS[BEAM], base, seed=8, randomise=True)
    code, _, err = beamline(capsys, "export", folder, tmp_path / "second", "--merge")
    assert code == 2 and f"foreign: its adapters were trained on {base} (index " in err
    assert f"and {base} has other weights (index " in err and not (tmp_path / "second").exists()


def planted(folder: Path, name: str, value: float) -> None:
    """A tensor with one other value, and a manifest that knows nothing of it."""
    tensors = {**TENSORS, name: TENSORS[name].copy()}
    tensors[name][0, 0] = value
    make_adapter_checkpoint(folder.parent, 2, folder.parents[3] / "base", BEAM, LORA, tensors)


def test_adapters_that_cannot_be_merged_leave_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    planted(folder, f"{GATE}.lora_B.weight", np.nan)
    assert damage(folder) == ""
    code, _, err = beamline(capsys, "export", folder, tmp_path / "model", "--merge")
    assert code == 2 and f"tensor {GATE}.lora_B.weight in {folder / 'adapter'} is not finite at [0, 0]" in err
    weights = folder / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    code, _, err = beamline(capsys, "export", folder, tmp_path / "model", "--merge")
    assert code == 2 and "damaged: adapter/adapter_model.safetensors" in err and "global_step_1" in err
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({**config, "r": "many"}))
    (folder / MANIFEST).write_bytes(manifest_of(folder, 2))
    code, _, err = beamline(capsys, "export", folder, tmp_path / "model", "--merge")
    assert code == 2 and "adapter_config.json does not describe adapters" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "runs"]


@pytest.mark.skipif(not can_mount(), reason="the kernel lets nobody here mount a small disk of their own")
def test_a_full_disk_is_named_with_what_is_needed(folder: Path, base: Path, tmp_path: Path):
    (tmp_path / "disk").mkdir()
    beamline = Path(sys.executable).with_name("beamline")
    program = (str(beamline), "export", str(folder), str(tmp_path / "disk" / "model"))
    command = (*APART, "sh", "-c", MOUNT, str(tmp_path / "disk"), *program, "--merge")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    size = (base / "model.safetensors").stat().st_size
    assert done.returncode == 2
    assert f"model came to nothing: No space left on device; the export takes about {size:,} bytes, and " in done.stderr


def test_a_checkpoint_on_another_base_is_refused_naming_both(folder: Path, base: Path, tmp_path: Path):
    tiny.build(tiny.SPECS[BEAM], tmp_path / "other", seed=8, randomise=True)
    with pytest.raises(WeightError, match=rf"trained on {base} .*and {tmp_path / 'other'} has other weights"):
        resolve(folder, model=tmp_path / "other")
    tiny.build(tiny.SPECS["tiny-qwen3-moe"], tmp_path / "qwen", seed=7)
    expected = rf"of another BeamForCausalLM than {tmp_path / 'qwen'}, that at {base} \(architectures is "
    with pytest.raises(WeightError, match=expected):
        resolve(folder, model=tmp_path / "qwen")
    shutil.copytree(base, tmp_path / "same")
    assert resolve(folder, model=tmp_path / "same") == folder


def config_of(base: Path, resume_path: Path, lora: LoraSection) -> RunConfig:
    trainer = {"resume_mode": "from_path", "resume_path": str(resume_path), "num_steps": 9}
    made_config = {"run": {"name": "next"}, "model": {"path": str(base)}, "trainer": trainer}
    config = msgspec.convert(made_config, RunConfig)
    return replace(config, model=replace(config.model, dtype="float32", lora=lora))


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        (LoraSection(), r"holds adapters, and model\.lora\.rank=0 trains all .*model\.lora\.rank=8 .*--merge"),
        (replace(LORA, rank=16), r"holds adapters with model\.lora\.rank=8, not 16: set it so"),
        (replace(LORA, alpha=8), r"holds adapters with model\.lora\.alpha=16, not 8: set it so"),
        (replace(LORA, targets=["linear_proj"]), r"model\.lora\.targets=\[all-linear\], not \[linear_proj\]: set it"),
        (replace(LORA, normalize_moe_lora=False), r"model\.lora\.normalize_moe_lora=true, not false: set it so"),
    ],
)
def test_a_run_with_other_adapters_is_refused(
    folder: Path, base: Path, tmp_path: Path, lora: LoraSection, expected: str
):
    with pytest.raises(ConfigError, match=expected):
        find_origin(config_of(base, folder, lora), tmp_path / "next", begun=False, say=print)


def test_a_run_with_the_same_adapters_goes_on_though_what_only_training_sees_has_changed(
    folder: Path, base: Path, tmp_path: Path
):
    lora = replace(LORA, dropout=0.1, sequence_parallel_input_regather=True)
    origin = find_origin(config_of(base, folder, lora), tmp_path / "next", begun=False, say=print)
    assert origin is not None and (origin.folder, origin.step) == (folder, 2)


def test_adapters_do_not_go_on_from_all_weights(tmp_path: Path):
    folder = make_checkpoint(tmp_path / "full", 1)
    with pytest.raises(ConfigError, match=rf"holds all weights.*model\.lora\.rank=0 .*model\.path={folder / 'policy'}"):
        find_origin(config_of(folder / "policy", folder, LORA), tmp_path / "next", begun=False, say=print)


def test_the_newest_of_all_checkpoints_is_merged(folder: Path, base: Path, tmp_path: Path):
    assert export_merged(folder.parent, tmp_path / "model", base) == tmp_path / "model"
