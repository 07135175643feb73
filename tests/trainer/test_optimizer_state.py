"""Optimizer state beside the engine: who owns what, folders on a disk, and checkpoints that cannot be loaded."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from beamline.models import tiny
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import BeamlineError, ConfigError, WeightError
from beamline.protocol.messages import BlobRef, Canary, PolicyUpdate
from beamline.trainer.megatron.build import build_model
from beamline.trainer.megatron.distributed import Layout
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.owners import share_out
from beamline.trainer.megatron.policy import MegatronPolicy
from beamline.trainer.megatron.states.choice import states_of
from beamline.trainer.megatron.states.device import DeviceStates
from beamline.trainer.megatron.states.disk import DiskStates
from beamline.trainer.megatron.states.host import HostStates
from beamline.trainer.resume import check_continues

pytest_plugins = ("trainer_engine",)

EMBEDDING = "model.embed_tokens.weight"
HOLDER = """
import sys, fcntl
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@given(
    sizes=st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 1000), max_size=30), ranks=st.integers(1, 5)
)
def test_state_is_shared_out_evenly_and_alike_on_every_rank(sizes: dict[str, int], ranks: int):
    owners = share_out(sizes, ranks)
    assert owners == share_out(dict(reversed(sizes.items())), ranks)
    loads = [sum(size for name, size in sizes.items() if owners[name] == rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def parameters(scale: float = 1.0, size: int = 40) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    made = {"weight": torch.randn(size, 3, generator=generator), "bias": torch.randn(size, generator=generator)}
    return {name: nn.Parameter(scale * tensor) for name, tensor in made.items()}


def step(states: DeviceStates | HostStates | DiskStates, held: dict[str, nn.Parameter]) -> None:
    for parameter in held.values():
        parameter.grad = parameter.detach().clone()
    states.step(1e-2)


def disk_config(directory: Path) -> RunConfig:
    trainer = {"optimizer": {"state": "disk", "state_dir": str(directory), "bucket_mib": 1}, "parallel": {"data": 2}}
    return msgspec.convert({"run": {"name": "one"}, "trainer": trainer}, RunConfig)


def test_a_run_that_begins_anew_replaces_what_one_of_its_name_has_left(tmp_path: Path):
    """Also of ranks that it has no longer, and of another model; the state of another run stays."""
    stays = tmp_path / "other" / "rank-00000" / "even.state"
    stays.parent.mkdir(parents=True)
    stays.write_bytes(b"of another run")
    for rank, size in ((0, 40), (7, 40), (0, 50)):
        held = parameters(size=size)
        states = states_of(disk_config(tmp_path), rank)(held, AdamWSettings())
        assert states.num_steps == 0
        step(states, held)
        assert torch.equal(states.read("weight").main, held["weight"].detach())
        assert states.num_steps == 1
        states.close()
    assert not list((tmp_path / "one" / "rank-00007").glob("*.state"))
    assert stays.read_bytes() == b"of another run"


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(tmp_path: Path):
    foreign = tmp_path / "one" / "rank-00000" / "thesis.tex"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"rank-00000 is for optimizer state, and has 'thesis\.tex' in it: name another"
    ):
        states_of(disk_config(tmp_path), 0)(parameters(), AdamWSettings())
    assert [path.name for path in foreign.parent.iterdir()] == ["thesis.tex"]


def test_a_folder_that_another_process_uses_is_refused(tmp_path: Path):
    DiskStates(parameters(), AdamWSettings(), directory=tmp_path).close()
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="is in use by process"):
            DiskStates(parameters(), AdamWSettings(), directory=tmp_path)
        holder.kill()


def test_every_place_takes_over_the_state_of_every_other(tmp_path: Path):
    """In bfloat16: what goes on is the main weights, not the rounded ones."""
    made = {
        "device": DeviceStates,
        "host": HostStates,
        "disk": lambda held, settings: DiskStates(held, settings, directory=tmp_path / "state"),
    }
    held = {name: nn.Parameter(p.detach().bfloat16()) for name, p in parameters().items()}
    for p in held.values():
        p.grad_dtype = torch.float32
    before = DeviceStates(held, AdamWSettings(weight_decay=0.1))
    for _ in range(2):
        for p in held.values():
            p.grad = p.detach().float()
        before.step(1e-3)
    before.write(tmp_path, "state")
    for name, make in made.items():
        fresh = {name: nn.Parameter(torch.zeros_like(p)) for name, p in held.items()}
        states = make(fresh, AdamWSettings(weight_decay=0.1))
        states.load(((name, before.read(name)) for name in held), before.num_steps)
        assert states.num_steps == 2
        for parameter, weights in held.items():
            assert torch.equal(fresh[parameter], weights), name
            assert torch.equal(states.read(parameter).main, before.read(parameter).main), name
            assert torch.equal(states.read(parameter).exp_avg_sq, before.read(parameter).exp_avg_sq), name
        states.close()


@pytest.fixture(scope="module")
def saved(one_rank: None, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of tiny Beam's start."""
    folder = tmp_path_factory.mktemp("saved")
    policy_of(model_dir).save(folder)
    return folder


def policy_of(model_dir: Path) -> MegatronPolicy:
    return MegatronPolicy(build_model(model_dir, Layout()), AdamWSettings(), 1.0)


def linked(saved: Path, into: Path) -> Path:
    """A checkpoint with the same files, which may be replaced."""
    for path in (path for path in saved.rglob("*") if path.is_file()):
        target = into / path.relative_to(saved)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)
    return into


def slots_without(saved: Path, folder: Path, change) -> Path:
    path = linked(saved, folder) / "optimizer" / "rank-00000.slots.json"
    slots = json.loads(path.read_bytes())
    parts = slots["parameters"]["embedding.word_embeddings.weight"]
    assert [part["tensor"] for part in parts] == [EMBEDDING]
    change(parts)
    path.unlink()
    path.write_text(json.dumps(slots), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda parts: parts.clear(), f"has no optimizer state of {EMBEDDING}: it is of another model"),
        (lambda parts: parts[0].update(shape=[7, 128]), f"{EMBEDDING} in .* has shape .7, 128., expected .512, 128."),
        (lambda parts: parts[0].update(size=[500, 128]), f"{EMBEDDING} in .* has 64000 of 65536 elements of its box"),
    ],
)
def test_state_that_lacks_a_tensor_is_refused_by_its_name(
    model_dir: Path, saved: Path, tmp_path: Path, change, expected: str
):
    policy = policy_of(model_dir)
    before = {name: tensor.clone() for name, tensor in policy.export()}
    with pytest.raises(WeightError, match=expected):
        policy.load(slots_without(saved, tmp_path, change))
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.export())


def test_state_that_is_missing_or_damaged_is_refused(model_dir: Path, saved: Path, tmp_path: Path):
    policy = policy_of(model_dir)
    folder = linked(saved, tmp_path)
    state = folder / "optimizer" / "rank-00000.state"
    content = bytearray(state.read_bytes())
    content[1000] ^= 1
    state.unlink()
    state.write_bytes(content)
    with pytest.raises(WeightError, match=r"rank-00000\.state is damaged: bucket 0"):
        policy.load(folder)
    for path in (folder / "optimizer").iterdir():
        path.unlink()
    with pytest.raises(WeightError, match=r"has no rank-00000\.slots\.json"):
        policy.load(folder)


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_of_another_model_is_refused_by_a_tensors_name(saved: Path, tmp_path: Path):
    tiny.build(tiny.TINY_QWEN3_MOE, tmp_path, seed=1)
    with pytest.raises(WeightError, match=r"policy (has no tensor|.*expected) .*it is of another model"):
        policy_of(tmp_path).load(saved)


def test_random_numbers_go_on_where_as_many_ranks_do(
    model_dir: Path, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    policy = policy_of(model_dir)
    folder = linked(saved, tmp_path)
    policy.load(folder)
    first = torch.rand(3)
    policy.load(folder)
    assert torch.equal(torch.rand(3), first)
    (folder / "rng" / "rank-00001.safetensors").symlink_to(folder / "rng" / "rank-00000.safetensors")
    policy.load(folder)
    assert not torch.equal(torch.rand(3), first)
    assert "random generators of 2 ranks do not fit 1" in caplog.text


@pytest.mark.parametrize(("first", "last"), [(0, 3), (6, 0), (6, 7)])
def test_a_trainer_that_starts_again_with_another_policy_is_refused(first: int, last: int):
    with pytest.raises(BeamlineError, match=f"at policy {last}, which died with its trainer, .* policy {first}: end"):
        check_continues("one", first, update(last))
    check_continues("one", first, update(first))
    check_continues("one", first, None)


def update(version: int) -> PolicyUpdate:
    nothing = BlobRef(owner="policy", key="manifest", kind="weight_manifest", num_bytes=0, checksum="0" * 16)
    canary = Canary(tokens=[1, 2], logprobs=[-1.0])
    return PolicyUpdate(step=version, policy_version=version, manifest=nothing, canary=canary, stats={})
