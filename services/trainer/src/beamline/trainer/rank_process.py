"""`python -m beamline.trainer.rank_process --run-dir DIR --rank N`: a rank other than 0, as `ranks` starts it."""

import argparse
import asyncio
import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from beamline.protocol.errors import ConfigError
from beamline.protocol.subjects import Subjects
from beamline.runtime.blob_store import BlobStore
from beamline.runtime.heavy_import import import_heavy
from beamline.runtime.json_log import set_up_logging
from beamline.runtime.run_files import read_config
from beamline.runtime.service import EXIT_CONFIG, EXIT_FAILED
from beamline.trainer import commands, environment
from beamline.trainer.commands import AnyCommand, Export, Join, Save, SaveWeights, Score, Train, Trim
from beamline.trainer.threads import num_threads

if TYPE_CHECKING:
    from beamline.trainer.rank import Rank

log = logging.getLogger("beamline.trainer.rank_process")
"""Run as a program, this module is called `__main__`."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m beamline.trainer.rank_process", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    arguments = parser.parse_args()
    last_words = _take_stdout()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    set_up_logging(f"trainer-rank-{arguments.rank}")
    log.info("rank %d starts as process %d", arguments.rank, os.getpid())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 drains, and then closes the input
    try:
        asyncio.run(_live(arguments.run_dir, arguments.rank))
    except ConfigError as error:
        _end(EXIT_CONFIG, last_words, str(error))
    except BaseException:
        _end(EXIT_FAILED, last_words, traceback.format_exc())


async def _live(run_dir: Path, rank: int) -> None:
    """Carry out commands, one after the other. Returns never: the end of the input ends the process."""
    pending: asyncio.Queue[AnyCommand] = asyncio.Queue()
    with ExitStack() as closing:
        listening = asyncio.create_task(_listen(pending))
        working = asyncio.create_task(_work(run_dir, rank, pending, closing))
        done, _ = await asyncio.wait((listening, working), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    os._exit(0)  # rank 0 is done, or dead; no collective that still waits for it will end


async def _listen(pending: asyncio.Queue[AnyCommand]) -> None:
    stream = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), sys.stdin)
    while (command := await commands.read(stream)) is not None:
        pending.put_nowait(command)


async def _work(run_dir: Path, number: int, pending: asyncio.Queue[AnyCommand], closing: ExitStack) -> None:
    from beamline.runtime.clients import open_clients  # nats: not for --help

    environment.prepare()
    config = read_config(run_dir)
    subjects = Subjects(prefix=config.bus.prefix, run=config.run.name)
    _, blobs = await open_clients(config, subjects, run_dir, "trainer", name=f"trainer-rank-{number}")
    loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, thread_name_prefix="policy")
    parts = await loop.run_in_executor(thread, import_heavy, "beamline.trainer.parts")
    join = await pending.get()
    assert isinstance(join, Join), f"{type(join).__name__} came before Join"
    build = partial(parts.build_rank, config, run_dir, num_threads(config), number, join.port)
    rank = await loop.run_in_executor(thread, build)
    closing.callback(rank.close)
    while True:
        work = await _prepared(await pending.get(), rank, blobs)
        await loop.run_in_executor(thread, work)


async def _prepared(command: AnyCommand, rank: "Rank", blobs: BlobStore) -> Callable[[], object]:
    """What the policy's thread has to do."""
    match command:
        case Train():
            share = await rank.share(command.batch, blobs)
            return partial(rank.train, command.batch, share, command.lr)
        case Export():
            return partial(rank.export, command.policy_version)
        case Score():
            return partial(rank.score, command.tokens)
        case Save():
            return partial(rank.save, Path(command.directory))
        case SaveWeights():
            return partial(rank.save_weights, Path(command.directory))
        case Trim():
            return rank.trim
        case Join():
            raise AssertionError("a rank joins once")


def _take_stdout() -> int:
    """Keep standard output for the last words; what libraries print goes to standard error."""
    kept = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return kept


def _end(code: int, descriptor: int, last_words: str) -> None:
    os.write(descriptor, last_words.encode())
    os._exit(code)  # the policy's thread may be waiting for ranks that are gone


if __name__ == "__main__":
    main()
