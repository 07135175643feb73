"""The trainer service: starts its ranks, publishes its first policy, then serves batches and phases until it drains."""

import asyncio
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from beamline.protocol.errors import BeamlineError
from beamline.protocol.layout import check_layout
from beamline.protocol.messages import Phase, PolicyUpdate
from beamline.runtime.heavy_import import import_heavy
from beamline.runtime.service import EXIT_FAILED, ServiceContext
from beamline.trainer import environment
from beamline.trainer.model_dir import check_model_dir
from beamline.trainer.ranks import OtherRanks
from beamline.trainer.resume import check_continues, first_step
from beamline.trainer.threads import num_threads

if TYPE_CHECKING:
    from beamline.trainer.saving import Saver

LEAVE_S = 8.0
"""How long the process may take to end after an error, which it reports first."""


async def main(context: ServiceContext) -> None:
    """Serve `work.trainer`.

    Raises:
        ConfigError: a model that is missing or incomplete, or a layout or token budget that does not fit it.
        WeightError: a checkpoint to go on from that is incomplete, or of another model.
        BeamlineError: the run is at another policy than the one with which this process begins.
        RankFailed: a rank other than this one, which is rank 0, has ended.
    """
    config = context.config
    model_dir = Path(config.model.path)
    check_model_dir(model_dir)
    check_layout(config, json.loads((model_dir / "config.json").read_text(encoding="utf-8")))
    environment.prepare()
    others = await OtherRanks.start(config.trainer.parallel.world_size, context.run_dir)
    context.status.waiting_for = "Megatron to start"
    thread = ThreadPoolExecutor(1, thread_name_prefix="policy")
    closing, savers = ExitStack(), list["Saver"]()
    try:
        await context.until_stopped(others.watch(), _serve(context, others, thread, closing, savers))
        await asyncio.to_thread(thread.shutdown)
        for saver in savers:
            await saver.finish()
    except Exception as error:
        _leave_soon()
        if not isinstance(error, BeamlineError):
            await others.blame()  # what looks like an error of rank 0's may be a broken connection to another
        raise
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
        closing.close()
        await others.close()


async def _serve(
    context: ServiceContext,
    others: OtherRanks,
    thread: ThreadPoolExecutor,
    closing: ExitStack,
    savers: list["Saver"],
) -> None:
    config, bus = context.config, context.bus
    first = first_step(config)
    loop = asyncio.get_running_loop()
    # torch and Megatron take seconds to import: on the thread that will use them, beside the event loop.
    parts = await loop.run_in_executor(thread, import_heavy, "beamline.trainer.parts")
    build = partial(parts.build_rank, config, context.run_dir, num_threads(config), tell=others.tell)
    rank = await loop.run_in_executor(thread, build)
    closing.callback(rank.close)
    check_continues(config.run.name, first, await bus.last(PolicyUpdate))
    worker = parts.build_worker(context, rank, thread)
    context.status.waiting_for = ""
    context.gauges.append(worker.gauges)
    await worker.saver.start()
    savers.append(worker.saver)
    await worker.publish_first(first)
    await context.until_stopped(
        bus.follow(Phase, worker.on_phase), bus.work("trainer", worker.handle), worker.saver.watch()
    )


def _leave_soon() -> None:
    """The policy's thread may wait for good for a rank that is gone, and Python for the thread."""
    timer = threading.Timer(LEAVE_S, os._exit, (EXIT_FAILED,))
    timer.daemon = True
    timer.start()
