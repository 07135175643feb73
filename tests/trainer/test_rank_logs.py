"""What a rank that is a process of its own writes to its trainer's log."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from beamline.runtime.deadline import deadline


async def test_a_rank_writes_the_lines_of_a_service(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "beamline.trainer.rank_process", "--run-dir", str(tmp_path), "--rank", "3"),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )
    async with deadline(60, "a rank without a run to end"):
        last_words, said = await process.communicate()
    assert b"config.json does not exist" in last_words
    first = json.loads(said.splitlines()[0])
    assert (first["worker"], first["level"]) == ("trainer-rank-3", "INFO")
    assert first["message"] == f"rank 3 starts as process {process.pid}"
