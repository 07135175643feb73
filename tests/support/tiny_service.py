"""A service whose worker name says how it behaves; started by the life-cycle tests as a process of its own."""

import asyncio
import logging

from beamline.protocol.errors import ConfigError
from beamline.protocol.messages import WorkerState
from beamline.runtime.service import ServiceContext, run_service

log = logging.getLogger("tiny")

START_S = {"slow": 0.2, "endless": 600}
"""How long a worker is starting."""


async def main(context: ServiceContext) -> None:
    await asyncio.sleep(START_S.get(context.worker, 0))
    context.status.state = WorkerState.READY
    context.status.policy_version = 7
    match context.worker:
        case "crash":
            raise KeyError("a defect")
        case "unusable":
            raise ConfigError("model.path='/nowhere' has no tokenizer: point it at a Hugging Face directory")
        case "done":
            return
        case "stubborn":
            await asyncio.Event().wait()
        case _:
            await context.until_stopped(context.bus.work("reward", ignore))


async def ignore(message: object) -> None:
    """Take an input and make nothing of it."""
    log.info("takes %s", type(message).__name__)


if __name__ == "__main__":
    run_service("reward", main)
