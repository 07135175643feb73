"""What can go wrong is told with its name, value and mend, and costs no generation."""

import errno
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from beamline.diskoptim.disk_adamw import DiskAdamW
from beamline.diskoptim.errors import DirectoryError, DiskFull, GradientError, StateError
from beamline.diskoptim.state_file import AdamState

Make = Callable[..., DiskAdamW]
Model = dict[str, torch.nn.Parameter]

HOLDER = """
import sys, torch
from beamline.diskoptim.disk_adamw import DiskAdamW
optimizer = DiskAdamW([torch.nn.Parameter(torch.ones(3))], sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""


def sums(optimizer: DiskAdamW) -> list[str]:
    return [bucket.xxh3_64 for bucket in optimizer._present.header.buckets]


def test_a_flipped_byte_stops_the_step(make: Make, model: Model) -> None:
    optimizer = make()
    optimizer.step()
    path = optimizer._present.path
    content = bytearray(path.read_bytes())
    content[len(content) - 5000] ^= 1
    path.write_bytes(content)
    with pytest.raises(StateError, match=r"odd\.state is damaged: bucket 5 .*'last'.* has the sum .*checkpoint"):
        optimizer.step()
    assert (optimizer.num_steps, bytearray(path.read_bytes())) == (1, content)
    optimizer.close()
    with pytest.raises(StateError, match="is damaged: bucket 5"):
        make().step()


def test_a_truncated_state_is_refused_when_it_is_opened_and_when_it_is_used(make: Make) -> None:
    optimizer = make()
    num_bytes = optimizer._present.header.num_bytes
    os.truncate(optimizer._present.path, num_bytes - 4096)
    refused = rf"even\.state has {num_bytes - 4096} bytes, and its header says {num_bytes}: truncated"
    with pytest.raises(StateError, match=refused):
        optimizer.step()
    optimizer.close()
    with pytest.raises(StateError, match=refused):
        make()


def test_a_vanished_directory_is_told(make: Make, model: Model) -> None:
    optimizer = make()
    optimizer.step()
    shutil.rmtree(optimizer.directory)
    before = model["weight"].detach().clone()
    with pytest.raises(DirectoryError, match=r"optimizer is gone, and generation 1 with it: restore it, or start"):
        optimizer.step()
    assert torch.equal(model["weight"], before)
    assert not optimizer.directory.exists()


def test_another_model_is_refused(make: Make, model: Model) -> None:
    optimizer = make()
    optimizer.step()
    optimizer.close()
    before = sums(optimizer)
    whole = dict(model)
    model["bias"] = torch.nn.Parameter(torch.ones(8))
    with pytest.raises(StateError, match=r"parameter 'bias' is \[8\], and \[7\] in .*odd\.state; give these"):
        make()
    model["bias"] = whole["bias"]
    model["more"] = torch.nn.Parameter(torch.ones(8))
    with pytest.raises(StateError, match=r"odd\.state has no parameter 'more'"):
        make()
    del model["more"], model["weight"]
    with pytest.raises(StateError, match=r"odd\.state has 'weight' and 0 more that are not given"):
        make()
    model.clear()
    model.update(whole)
    assert sums(make()) == before


def test_another_process_is_refused_by_its_id(make: Make, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "optimizer")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        with pytest.raises(DirectoryError, match=rf"is in use by process {holder.pid} \(.*python.*\): stop it, or"):
            make()
        holder.communicate(timeout=10)
    with pytest.raises(StateError, match="no parameter 'scale'"):
        make()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(wrong: float, make: Make, model: Model) -> None:
    optimizer = make()
    optimizer.step()
    weight, before, gradient = model["weight"], sums(optimizer), model["weight"].grad
    assert gradient is not None
    kept, finite = weight.detach().clone(), gradient.clone()
    gradient[3, 5] = wrong
    with pytest.raises(
        GradientError, match=rf"'weight' is not finite: 1 of 16512 elements, .* 389 is {wrong}; nothing"
    ):
        optimizer.step()
    assert torch.equal(weight, kept) and sums(optimizer) == before
    gradient.copy_(finite)
    optimizer.step()
    assert optimizer.num_steps == 2


def test_gradients_that_are_missing_or_misshapen_are_named(make: Make, model: Model) -> None:
    optimizer = make()
    with pytest.raises(GradientError, match=r"the gradient of 'bias' is \[8\] on cpu, and the parameter \[7\] on cpu"):
        optimizer.step(grads={name: torch.ones(8 if name == "bias" else p.shape) for name, p in model.items()})
    model["bias"].grad = None
    with pytest.raises(GradientError, match="'bias' has no gradient: leave it out of params, or give it zeros"):
        optimizer.step()


def test_a_disk_that_fails_in_mid_step_lets_the_step_be_repeated(
    make: Make, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a filesystem that promised room it has not. Clipping does not count twice."""
    reference, initial = make(tmp_path / "reference", max_grad_norm=0.1), model["weight"].detach().clone()
    reference.step()
    expected = {name: parameter.detach().clone() for name, parameter in model.items()}
    with torch.no_grad():
        for parameter in model.values():
            parameter.zero_()
    model["weight"].data.copy_(initial)
    optimizer = make(max_grad_norm=0.1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", failing_at(3))
        with pytest.raises(DiskFull, match=r"optimizer has no room: \d+ bytes are needed"):
            optimizer.step()
    assert optimizer.num_steps == 0
    optimizer.step()
    assert torch.equal(model["weight"], expected["weight"])


def failing_at(number: int) -> Callable[[int, Sequence[memoryview], int], int]:
    """os.pwritev, but for one call."""
    write, calls = os.pwritev, itertools.count(1)

    def failing(file: int, views: Sequence[memoryview], offset: int) -> int:
        if next(calls) == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, views, offset)

    return failing


def test_a_closed_optimizer_writes_no_more(make: Make) -> None:
    optimizer = make()
    optimizer.close()
    with pytest.raises(DirectoryError, match="was closed, and may be another process's"):
        optimizer.step()
    make().step()


def test_an_import_that_lacks_something_leaves_the_present_generation(make: Make, model: Model) -> None:
    optimizer = make()
    optimizer.step()
    before = sums(optimizer)
    fresh = {name: AdamState.fresh(parameter) for name, parameter in model.items()}
    for given, why in (
        ([("scale", fresh["scale"])], "the state of 'bias' is missing, and of 3 more"),
        ([("scale", fresh["scale"])] * 2, "'scale' is no parameter of this optimizer, or was given twice"),
        ([("scale", fresh["bias"])], r"main of 'scale' is \[7\], the parameter \[\]"),
    ):
        with pytest.raises(StateError, match=why):
            optimizer.import_state(given, 5)
    assert (optimizer.num_steps, sums(optimizer)) == (1, before)
    optimizer.step()
    optimizer.close()
    assert make().num_steps == 2


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"lr": -1.0}, "lr=-1.0: give 0 or more"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"bucket_bytes": 1000}, "bucket_bytes=1000 is below 65536"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, object], why: str, make: Make) -> None:
    with pytest.raises(ValueError, match=why):
        make(**settings)


def test_parameters_that_cannot_be_kept(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 3))
    for params, why in (
        ([], "there are no parameters"),
        ([("a", weight), ("b", weight)], "'b' is the same tensor as 'a'"),
        ([("a", weight), ("a", torch.nn.Parameter(torch.ones(1)))], "two parameters are named 'a'"),
        ([weight.detach().T], "'0' is not contiguous"),
        ([torch.ones(3, dtype=torch.int64)], "'0' is torch.int64"),
        ([{"params": [weight], "momentum": 1}], r"a group has \['momentum'\]"),
    ):
        with pytest.raises(ValueError, match=why):
            DiskAdamW(params, tmp_path / "optimizer")
    assert not (tmp_path / "optimizer").exists()


def test_files_of_a_directory_that_were_swapped_are_noticed(make: Make) -> None:
    optimizer = make()
    optimizer.step()
    optimizer.close()
    for suffix in (".state", ".json"):
        folder = optimizer.directory
        (folder / f"even{suffix}").rename(folder / f"x{suffix}")
        (folder / f"odd{suffix}").rename(folder / f"even{suffix}")
    with pytest.raises(StateError, match=r"even\.json is of generation 1, which belongs in the other slot"):
        make()
