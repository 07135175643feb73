"""What happens on disks that are full, or have no O_DIRECT. Prints what was found as JSON.

    unshare --map-root-user --mount python small_disks.py FOLDER

It mounts filesystems of its own below the folder, which only this process sees.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from beamline.diskoptim.disk_adamw import DiskAdamW
from beamline.diskoptim.errors import DiskFull
from beamline.diskoptim.state_file import AdamState, StateFile, write_state

NUM_PARAMS = 100_000
STATE_BYTES = 12 * NUM_PARAMS


def mount(folder: Path, kind: str, options: str) -> Path:
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", kind, "-o", options, kind, str(folder)], check=True)
    return folder


def model() -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(4)
    parameter = torch.nn.Parameter(torch.randn(NUM_PARAMS, generator=generator))
    parameter.grad = torch.randn(NUM_PARAMS, generator=generator)
    return parameter


def optimizer_of(parameter: torch.Tensor, directory: Path) -> DiskAdamW:
    return DiskAdamW([("weight", parameter)], directory, bucket_bytes=2**18)


def said(error: type[Exception], action: Callable[[], object]) -> str:
    try:
        action()
    except error as raised:
        return str(raised)
    return "nothing was raised"


def too_small_from_the_start(folder: Path) -> dict[str, object]:
    """One generation fits, two do not; it is said before anything is written."""
    disk = mount(folder / "tiny", "tmpfs", f"size={STATE_BYTES * 3 // 2}")
    error = said(DiskFull, lambda: optimizer_of(model(), disk / "state"))
    return {"error": error, "files": sorted(path.name for path in (disk / "state").iterdir())}


def full_in_the_middle(folder: Path) -> dict[str, object]:
    """Two generations fit, a snapshot beside them does not; then the disk grows."""
    disk = mount(folder / "small", "tmpfs", f"size={STATE_BYTES * 5 // 2}")
    parameter = model()
    optimizer = optimizer_of(parameter, disk / "state")
    optimizer.step()
    optimizer.snapshot(disk / "checkpoint", "x")
    optimizer.step()
    before = parameter.detach().clone()
    found: dict[str, object] = {"error": said(DiskFull, optimizer.step)}
    found["untouched"] = torch.equal(parameter, before) and optimizer.num_steps == 2
    StateFile.open(disk / "checkpoint", "x").verify()
    optimizer._present.verify()
    subprocess.run(["mount", "-o", f"remount,size={STATE_BYTES * 4}", str(disk)], check=True)
    optimizer.step()
    optimizer.close()
    again = optimizer_of(parameter, disk / "state")
    again.step()
    found["num_steps"], found["equal"] = again.num_steps, torch.equal(parameter, trained(folder / "roomy", 4))
    return found


def full_while_a_state_is_written(folder: Path) -> dict[str, object]:
    disk = mount(folder / "writing", "tmpfs", f"size={STATE_BYTES // 2}")
    state = AdamState.fresh(model())
    found = {"error": said(DiskFull, lambda: write_state(disk, "x", [("weight", state)], 1))}
    return {**found, "headers": [path.name for path in disk.glob("*.json")]}


def without_direct_io(folder: Path) -> dict[str, object]:
    disk = mount(folder / "ram", "ramfs", "mode=755")
    parameter = model()
    optimizer = optimizer_of(parameter, disk / "state")
    optimizer.step()
    optimizer.step()
    return {"io": optimizer._io, "equal": torch.equal(parameter, trained(folder / "direct", 2))}


def trained(directory: Path, num_steps: int) -> torch.Tensor:
    """The same on a disk where nothing goes wrong."""
    parameter = model()
    optimizer = optimizer_of(parameter, directory)
    for _ in range(num_steps):
        optimizer.step()
    return parameter


def main() -> None:
    folder = Path(sys.argv[1])
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    torch.set_num_threads(1)
    tests = (too_small_from_the_start, full_in_the_middle, full_while_a_state_is_written, without_direct_io)
    print(json.dumps({test.__name__: test(folder) for test in tests}))


if __name__ == "__main__":
    main()
