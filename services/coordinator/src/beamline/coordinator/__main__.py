"""`python -m beamline.coordinator --run-dir DIR`: builds the coordinator's parts and serves one run."""

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING

from beamline.runtime.service import ServiceContext, run_service

if TYPE_CHECKING:
    from beamline.coordinator.core import Core
    from beamline.coordinator.numbers import Numbers
    from beamline.coordinator.recorder import Recorder
    from beamline.models.chat import ChatTokenizer
    from beamline.protocol.messages import Message


async def main(context: ServiceContext) -> None:
    from beamline.coordinator.admission import Admission
    from beamline.coordinator.coordinator import Coordinator
    from beamline.coordinator.core import Core
    from beamline.coordinator.doctor.keep import SampleKeeper
    from beamline.coordinator.evaluator import Evaluator
    from beamline.coordinator.gauges import CoordinatorGauges
    from beamline.coordinator.numbers import Numbers
    from beamline.coordinator.parts import make_lease
    from beamline.coordinator.prompts import eval_prompts, load_tokenizer, tokenizer_of, train_cursor
    from beamline.coordinator.resume import evaluated_here, open_resume, resume
    from beamline.protocol.messages import WorkerState

    config = context.config
    chat, numbers = load_tokenizer(config), Numbers(context.run_dir / "gauges.jsonl")
    core = Core(config, context.bus, context.blobs)
    await core.replay()
    tokenize = tokenizer_of(config, chat)
    cursor = train_cursor(config, tokenize)
    found = open_resume(core, cursor, context.run_dir)
    first_step = found.ledger.step + 1 if found else 0
    recorder = await _make_recorder(context, chat, numbers, None if core.state.has_begun else first_step)
    sets = [(eval_set, eval_prompts(eval_set, config.data, tokenize)) for eval_set in config.data.evals]
    evaluator = Evaluator(core, sets, recorder.record_eval, SampleKeeper(context.run_dir / "doctor", context.blobs))
    if found:
        await resume(core, found, evaluated_here(context.run_dir, found.ledger.step, evaluator.names))
    lease = await make_lease(core)
    admission = Admission(core, cursor, lease)
    gauges = CoordinatorGauges(core, evaluator)
    context.gauges.append(gauges.read)
    context.status.state = WorkerState.READY
    hearing = context.bus.subscribe(context.bus.subjects.metrics(), lambda told: _hear(told, core, numbers, recorder))
    beside = [asyncio.create_task(loop) for loop in (_stop_on_signal(context, core), gauges.look(), hearing)]
    with _prometheus(context, numbers):
        try:
            await Coordinator(core, admission, evaluator, lease, recorder).serve()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.to_thread(recorder.close)


async def _hear(message: "Message", core: "Core", numbers: "Numbers", recorder: "Recorder") -> None:
    """A worker's numbers: kept first, then told to who waits for the last of them."""
    await numbers.hear(message, recorder)
    core.roster.record_told(message)
    core.pulse.beat()


async def _make_recorder(
    context: ServiceContext, chat: "ChatTokenizer", numbers: "Numbers", void_from: int | None
) -> "Recorder":
    """With the run's loggers, which may take seconds to open."""
    from beamline.coordinator.launch.launcher import SERVICES
    from beamline.coordinator.launch.local import interpreter
    from beamline.coordinator.loggers import open_loggers
    from beamline.coordinator.recorder import Recorder
    from beamline.coordinator.samples import SampleFiles
    from beamline.coordinator.versions import library_versions

    run_dir, config = context.run_dir, context.config
    interpreters = {service: interpreter(service) for service in SERVICES}
    versions = await asyncio.to_thread(library_versions, interpreters)
    loggers = await asyncio.to_thread(open_loggers, run_dir, config, void_from)
    samples = SampleFiles(run_dir / "samples", context.blobs, chat, config.telemetry.kept_groups)
    return Recorder(run_dir, config, [*loggers, numbers], versions, samples)


def _prometheus(context: ServiceContext, numbers: "Numbers") -> ExitStack:
    """The endpoint, if the run has one, until the stack is left."""
    stack = ExitStack()
    if port := context.config.telemetry.prometheus_port:
        from beamline.coordinator.prometheus import serve_prometheus  # for the runs that want it

        stack.callback(serve_prometheus(port, numbers.latest))
    return stack


async def _stop_on_signal(context: ServiceContext, core: "Core") -> None:
    """A signal is a request to finish the step under way."""
    await context.stop.wait()
    core.stopping = True
    core.pulse.beat()


if __name__ == "__main__":
    run_service("coordinator", main)
