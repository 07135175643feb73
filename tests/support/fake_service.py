"""Stands in for a service's program in the launcher's tests, with the real life cycle on the real bus.

    python fake_service.py SERVICE,BEHAVIOUR[,WORKER or STEP...] --run-dir DIR --worker NAME

BEHAVIOUR, of any service: `serve` waits to be stopped; `refuse` and `crash` end by an error; `once` is killed at its
first start; `child` starts a process of its own, notes its pid, and serves; `deaf` does not drain; `leave` ends with
exit code 7, and `die` by SIGTERM; `freeze` stops itself, and `block` keeps its event loop busy. Of a trainer:
`lost,4,7` saves step 4 and is killed, at its second start saves step 7 and is killed, and then serves. Of a
coordinator: `finish` waits for the named workers to be ready, takes one step and ends; `resumed,7` does so in a run
that goes on after step 7; `follow` ends when it is asked to; `idle` does not answer.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from beamline.protocol.errors import ConfigError
from beamline.protocol.messages import (
    EvalResult,
    Heartbeat,
    Message,
    Metrics,
    Phase,
    PhaseName,
    StatusReply,
    StopRequest,
    WorkerState,
)
from beamline.runtime.checkpoints import root_of, step_folder
from beamline.runtime.service import ServiceContext, run_service
from made_checkpoints import make_checkpoint


async def main(context: ServiceContext) -> None:
    behaviour = BEHAVIOUR
    starts = context.run_dir / f"{context.worker}.starts"
    starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
    (context.run_dir / f"{context.worker}.pid").write_text(str(os.getpid()))
    await context.blobs.put(f"made-by-{context.worker}", "trajectories", b"payload")
    context.status.state = WorkerState.READY
    match behaviour:
        case "refuse":
            raise ConfigError("trainer.optimizer.lr=-1: must be above 0")
        case "crash":
            raise RuntimeError("the loss is NaN at step 3")
        case "once" if len(starts.read_text()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case "lost" if len(starts.read_text()) <= len(GIVEN):
            save(context, int(GIVEN[len(starts.read_text()) - 1]))
            os.kill(os.getpid(), signal.SIGKILL)
        case "finish":
            await take_one_step(context, GIVEN)
        case "resumed" if Path(context.config.trainer.resume_path).name == f"global_step_{GIVEN[0]}":
            await take_one_step(context, ["trainer", "reward"])
        case "idle":
            await context.bus.ensure_streams()
            await context.stop.wait()
        case "follow":
            await end_when_asked(context)
        case "child":
            child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
            (context.run_dir / "child.pid").write_text(str(child.pid))
            await context.stop.wait()
        case "leave":
            os._exit(7)
        case "die":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
            await context.stop.wait()
        case "block":
            hold_the_loop()
        case "deaf":
            await asyncio.Event().wait()
        case _:
            await context.stop.wait()


def hold_the_loop() -> None:
    """As a defect in a service would: no heartbeat gets out."""
    threading.Event().wait()


def save(context: ServiceContext, step: int) -> None:
    """A checkpoint of the run's model, unless it is there."""
    root = root_of(context.run_dir, context.config.trainer.checkpoint_path)
    config = (Path(context.config.model.path) / "config.json").read_bytes()
    if not step_folder(root, step).exists():
        make_checkpoint(root, step, files={"policy/config.json": config})


async def take_one_step(context: ServiceContext, wait_for: Sequence[str]) -> None:
    """Wait for what the other workers have to do first, say what a coordinator says, and finish."""
    await context.bus.ensure_streams()
    for worker in wait_for:
        await until_ready(context, worker)
    values = {"reward/mean": 0.5, "timing/step": 2.0}
    await context.bus.publish(Metrics(service="coordinator", worker=context.worker, step=1, values=values))
    accuracy = {"accuracy": 0.75, "accuracy_low": 0.7, "accuracy_high": 0.8}
    await context.bus.publish(
        EvalResult(step=1, policy_version=1, name="sums", num_problems=4, num_samples=8, values=accuracy)
    )
    await context.bus.publish(Phase(sequence=1, step=1, phase=PhaseName.DONE, policy_version=1, granted=True))
    (context.run_dir / "summary.json").write_text("{}")


async def until_ready(context: ServiceContext, worker: str) -> None:
    """Until a heartbeat of the worker says so; one that is killed at its first start never gets there before."""

    async def seen(message: Message) -> None:
        if isinstance(message, Heartbeat) and message.worker == worker and message.state is WorkerState.READY:
            ready.set()

    ready = asyncio.Event()
    async with asyncio.timeout(20):
        await context.until_stopped(context.bus.subscribe(context.bus.subjects.heartbeat(worker), seen), _wait(ready))


async def end_when_asked(context: ServiceContext) -> None:
    """A coordinator that runs until StopRequest."""
    await context.bus.ensure_streams()
    asked = asyncio.Event()

    async def answer(request: Message) -> StatusReply:
        if isinstance(request, StopRequest):
            asked.set()
        return StatusReply(
            run=context.config.run.name, step=3, num_steps=9, phase=PhaseName.TRAIN, policy_version=2, paused=False,
            waiting_for="the trainer", ledger={"issued": 4, "trained": 4}, workers=[], metrics={},
        )  # fmt: skip

    with (context.run_dir / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 1, "time": 0.0, "values": {}}\n')
    await context.until_stopped(context.bus.serve(answer), _wait(asked))
    if asked.is_set():
        (context.run_dir / "summary.json").write_text("{}")


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


if __name__ == "__main__":
    SERVICE, BEHAVIOUR, *GIVEN = sys.argv[1].split(",")
    run_service(SERVICE, main, sys.argv[2:])
