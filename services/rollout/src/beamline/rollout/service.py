"""The rollout service: starts the engine, then serves groups, policies and phases until it is asked to drain."""

import asyncio
import importlib
from pathlib import Path

from beamline.protocol.config import Placement, RunConfig
from beamline.protocol.messages import Phase, PolicyUpdate
from beamline.rollout import checkpoint, environment
from beamline.rollout.activation import Activation
from beamline.rollout.engine import Engine
from beamline.rollout.readiness import Readiness
from beamline.rollout.worker import RolloutWorker
from beamline.runtime.service import ServiceContext

ANSWER_SHARE = 0.1
"""Of the time that a group has: for handing its samples out, grading them, and the way to the coordinator."""


async def main(context: ServiceContext) -> None:
    """Serve `work.rollout`.

    Raises:
        ConfigError: a model that is missing, incomplete, or too short for the configured lengths.
        EngineError: the engine broke.
    """
    config = context.config
    layout = checkpoint.routing_layout(Path(config.model.path)) if config.algorithm.routing_replay else None
    context.status.waiting_for = "vLLM to start"
    engine = await start_engine(config)
    readiness = Readiness(context.status, config.canary_tolerance)
    try:
        worker = RolloutWorker(
            worker=context.worker,
            incarnation=context.incarnation,
            engine=engine,
            blobs=context.blobs,
            publish=context.bus.publish,
            readiness=readiness,
            activation=Activation(engine, context.blobs, readiness, exact=config.model.dtype == "float32"),
            colocated=config.run.placement is Placement.COLOCATED,
            layout=layout,
            answer_s=ANSWER_SHARE * config.rollout.group_deadline_s,
        )
        await context.until_stopped(
            engine.until_broken(),
            context.bus.follow(PolicyUpdate, worker.on_policy),
            context.bus.follow(Phase, worker.on_phase),
            context.bus.work(
                "rollout",
                worker.handle,
                concurrency=config.rollout.groups_in_flight,
                gate=readiness.when_open,
                on_rejected=worker.on_rejected,
            ),
        )
    finally:
        await engine.close()


async def start_engine(config: RunConfig) -> Engine:
    """Import vLLM, which takes long, beside the event loop, then start it on the configured model."""
    model_path = Path(config.model.path)
    checkpoint.check_servable(model_path, config.max_model_tokens)
    engine = config.rollout.engine
    environment.prepare(engine.threads, engine.tensor_parallel * engine.pipeline_parallel)
    module = await asyncio.to_thread(importlib.import_module, "beamline.rollout.vllm_engine")
    return await module.VllmEngine.start(
        model_path,
        dtype=config.model.dtype,
        max_model_tokens=config.max_model_tokens,
        config=engine,
        routed_experts=config.algorithm.routing_replay,
    )
