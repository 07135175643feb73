"""The rollout service: starts the engine, then serves groups, policies and phases until it is asked to drain."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from beamline.environments.host import EnvironmentPool
from beamline.protocol.config import Placement, RunConfig
from beamline.protocol.environment_config import EnvironmentSection
from beamline.protocol.messages import Fence, Phase, PolicyUpdate
from beamline.rollout import checkpoint, environment
from beamline.rollout.engine import Engine, Sampler
from beamline.rollout.metered import MeteredSampler
from beamline.rollout.readiness import Readiness
from beamline.rollout.worker import RolloutWorker
from beamline.runtime.heavy_import import import_heavy
from beamline.runtime.service import ServiceContext
from beamline.runtime.step_metrics import StepMetrics

if TYPE_CHECKING:
    from beamline.rollout.policy_sync import PolicySync

ANSWER_SHARE = 0.1
"""Of the time that a group has: for handing its samples out, grading them, and the way to the coordinator."""


async def main(context: ServiceContext) -> None:
    """Serve `work.rollout`.

    Raises:
        ConfigError: a model that is missing, incomplete, or too short for the configured lengths; an environment that
            cannot be loaded.
        EngineError: the engine broke.
    """
    config = context.config
    async with started_environments(config.rollout.environment) as environments:
        context.status.waiting_for = "vLLM to start"
        engine = await start_engine(config)
        try:
            await serve(context, engine, make_sampler(engine, environments, config) if environments else engine)
        finally:
            await engine.close()


async def serve(context: ServiceContext, engine: Engine, sampler: Sampler) -> None:
    """Sample groups, follow policies and phases, until the service is asked to drain. Raises EngineError."""
    config = context.config
    readiness = Readiness(context.status)
    metered = MeteredSampler(context.worker, sampler, engine.meter)
    steps = StepMetrics("rollout", context.worker, context.bus.publish, metered.take)
    context.gauges.append(metered.gauges)
    policies = follow_policies(context, engine, readiness)
    worker = RolloutWorker(
        worker=context.worker,
        incarnation=context.incarnation,
        engine=engine,
        sampler=metered,
        blobs=context.blobs,
        publish=context.bus.publish,
        readiness=readiness,
        colocated=config.run.placement is Placement.COLOCATED,
        shape=checkpoint.routing_shape(Path(config.model.path)) if config.algorithm.routing_replay else None,
        answer_s=ANSWER_SHARE * config.rollout.group_deadline_s,
    )
    await context.until_stopped(
        engine.until_broken(),
        context.bus.follow(PolicyUpdate, policies.on_update),
        context.bus.follow(Fence, policies.on_fence),
        context.bus.follow(Phase, worker.on_phase),
        context.bus.follow(Phase, steps.on_phase),
        context.bus.work(
            "rollout",
            worker.handle,
            concurrency=config.rollout.groups_in_flight,
            gate=readiness.when_open,
            on_rejected=worker.on_rejected,
        ),
    )


def follow_policies(context: ServiceContext, engine: Engine, readiness: Readiness) -> "PolicySync":
    """The worker's side of the fence, as configured."""
    from beamline.rollout.activation import Activation, pause_of  # numpy: not for --help
    from beamline.rollout.policy_sync import PolicySync

    config = context.config
    return PolicySync(
        worker=context.worker,
        incarnation=context.incarnation,
        publish=context.bus.publish,
        readiness=readiness,
        activation=Activation(
            engine,
            context.blobs,
            readiness,
            pause=pause_of(config.weights),
            deadline_s=config.weights.deadline_s,
            canary_tolerance=config.canary_tolerance,
            exact=config.model.dtype == "float32",
            canary_first=config.model.lora.is_on,
        ),
    )


@asynccontextmanager
async def started_environments(section: EnvironmentSection) -> AsyncIterator[EnvironmentPool | None]:
    """The processes of the run's environment; None where it has none. Raises ConfigError."""
    if not section.name:
        yield None
        return
    pool = EnvironmentPool(
        section.name,
        num_workers=section.workers,
        timeout_s=section.timeout_s,
        memory_bytes=section.memory_mib << 20,
    )
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def make_sampler(engine: Engine, environments: EnvironmentPool, config: RunConfig) -> Sampler:
    """The engine with the run's environment between its turns."""
    from beamline.models.chat import ChatTokenizer  # templates: not for a run without an environment
    from beamline.rollout.turns import Turns

    return Turns(
        engine,
        environments,
        ChatTokenizer.load(config.model.path),
        template_kwargs=config.data.chat_template_kwargs,
        max_turns=config.rollout.environment.max_turns,
    )


async def start_engine(config: RunConfig) -> Engine:
    """Import vLLM, which takes long, beside the event loop, then start it on the configured model."""
    model_path = Path(config.model.path)
    checkpoint.check_servable(model_path, config.max_model_tokens)
    engine = config.rollout.engine
    environment.prepare(engine.threads, engine.tensor_parallel * engine.pipeline_parallel)
    module = await asyncio.to_thread(import_heavy, "beamline.rollout.vllm_engine")
    return await module.VllmEngine.start(
        model_path,
        dtype=config.model.dtype,
        max_model_tokens=config.max_model_tokens,
        config=engine,
        routed_experts=config.algorithm.routing_replay,
        lora=config.model.lora,
    )
