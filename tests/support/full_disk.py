"""`trainer-python full_disk.py FOLDER copy|seal`: three checkpoints on a disk that is full for the second.

Run by `on_small_disk` where FOLDER/disk is a filesystem of 1 MiB. Prints what the trainer has answered, and what lies
on the disk after the second and after the third, as JSON.
"""

import asyncio
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

APART = ("unshare", "--map-root-user", "--mount")
"""Runs a command that may mount what it likes, and nobody else sees it."""
MOUNT = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"'
DEADLINE_S = 60
LEFT_BYTES = 16 * 1024
"""Of the full disk: too little for a tokenizer."""


def can_mount() -> bool:
    """Whether a small disk can be had here."""
    command = (*APART, "sh", "-c", MOUNT, "/mnt", "true")
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def on_small_disk(python: str, folder: Path, when: str) -> dict[str, Any]:
    """Run this program; returns what it prints."""
    (folder / "disk").mkdir()
    program = (python, __file__, str(folder), when)
    command = (*APART, "sh", "-c", MOUNT, str(folder / "disk"), *program)
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def main(folder: Path, when: str) -> None:
    from beamline.runtime import checkpoints
    from trainer_bench import Bench

    def lies_there(step: int) -> dict[str, Any]:
        found = sorted(path.name for path in bench.root.iterdir())
        return {f"damage of step {step}": checkpoints.damage(bench.root / f"global_step_{step}"), "files": found}

    with ThreadPoolExecutor(1) as thread:
        bench = Bench(folder, thread, root=folder / "disk")
        await bench.worker.publish_first()
        await bench.train(1)
        saved = [await bench.keep(1)]
        await bench.train(2)
        ballast, files = folder / "disk" / "ballast", {"ledger.json": b"x" * 2**20 if when == "seal" else b"x"}
        if when == "copy":
            ballast.write_bytes(bytes(shutil.disk_usage(folder / "disk").free - LEFT_BYTES))
        saved.append(await bench.keep(2, files=files))
        after = lies_there(1)
        ballast.unlink(missing_ok=True)
        await bench.train(3)
        saved.append(await bench.keep(3))
        bench.rank.close()
    told = {"saved": msgspec.to_builtins(saved), "after": after, "end": lies_there(3)}
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
