"""`python -m beamline.coordinator --run-dir DIR`: builds the coordinator's parts and serves one run."""

import asyncio
from typing import TYPE_CHECKING

from beamline.runtime.service import ServiceContext, run_service

if TYPE_CHECKING:
    from beamline.coordinator.core import Core


async def main(context: ServiceContext) -> None:
    from beamline.coordinator.admission import Admission
    from beamline.coordinator.coordinator import Coordinator
    from beamline.coordinator.core import Core
    from beamline.coordinator.doctor.keep import SampleKeeper
    from beamline.coordinator.evaluator import Evaluator
    from beamline.coordinator.launch.launcher import SERVICES
    from beamline.coordinator.launch.local import interpreter
    from beamline.coordinator.loggers import make_loggers
    from beamline.coordinator.parts import make_lease
    from beamline.coordinator.prompts import eval_prompts, tokenizer_of, train_cursor
    from beamline.coordinator.recorder import Recorder
    from beamline.coordinator.versions import library_versions
    from beamline.protocol.messages import WorkerState

    config = context.config
    interpreters = {service: interpreter(service) for service in SERVICES}
    versions = await asyncio.to_thread(library_versions, interpreters)
    core = Core(config, context.bus, context.blobs)
    await core.replay()
    tokenize = tokenizer_of(config)
    lease = await make_lease(core)
    recorder = Recorder(context.run_dir, config, make_loggers(config.run.loggers), versions)
    sets = [(eval_set, eval_prompts(eval_set, config.data, tokenize)) for eval_set in config.data.evals]
    coordinator = Coordinator(
        core,
        Admission(core, train_cursor(config, tokenize), lease),
        Evaluator(core, sets, recorder.record_eval, SampleKeeper(context.run_dir / "doctor", context.blobs)),
        lease,
        recorder,
    )
    context.status.state = WorkerState.READY
    stopping = asyncio.create_task(_stop_on_signal(context, core))
    try:
        await coordinator.serve()
    finally:
        stopping.cancel()


async def _stop_on_signal(context: ServiceContext, core: "Core") -> None:
    """A signal is a request to finish the step under way."""
    await context.stop.wait()
    core.stopping = True
    core.pulse.beat()


if __name__ == "__main__":
    run_service("coordinator", main)
