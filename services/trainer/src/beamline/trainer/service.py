"""The trainer service: builds the policy, publishes version 0, then serves batches and phases until asked to drain."""

import asyncio
import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from beamline.protocol.config import ParallelSection, Placement, RunConfig
from beamline.protocol.errors import BeamlineError, ConfigError
from beamline.protocol.messages import Phase, PolicyUpdate
from beamline.protocol.subjects import Subjects
from beamline.runtime.service import ServiceContext
from beamline.runtime.shm_blobs import shm_root
from beamline.trainer import environment
from beamline.trainer.model_dir import check_model_dir


async def main(context: ServiceContext) -> None:
    """Serve `work.trainer`.

    Raises:
        ConfigError: a model that is missing or incomplete, a layout that one rank cannot hold, or a token budget that
            the longest sequence exceeds.
        BeamlineError: the run is past policy 0 and this process has not trained it.
    """
    config, bus = context.config, context.bus
    _check_layout(config.trainer.parallel)
    _check_budget(config)
    check_model_dir(Path(config.model.path))
    context.status.waiting_for = "Megatron to start"
    environment.prepare()
    with ThreadPoolExecutor(1, thread_name_prefix="policy") as thread:
        loop = asyncio.get_running_loop()
        # torch and Megatron take seconds to import: on the thread that will use them, beside the event loop.
        parts = await loop.run_in_executor(thread, importlib.import_module, "beamline.trainer.parts")
        policy = await loop.run_in_executor(thread, parts.build_policy, config, _num_threads(config))
        await _check_fresh(context)
        weights = shm_root(Subjects(prefix=config.bus.prefix, run=config.run.name), context.run_dir) / "weights"
        worker = parts.build_worker(context, policy, thread, weights)
        context.status.waiting_for = ""
        await worker.publish_first()
        await context.until_stopped(bus.follow(Phase, worker.on_phase), bus.work("trainer", worker.handle))


def _check_layout(parallel: ParallelSection) -> None:
    for name in ("tensor", "expert", "pipeline", "data"):
        if getattr(parallel, name) != 1:
            raise ConfigError(
                f"trainer.parallel.{name}={getattr(parallel, name)}: the trainer service runs one rank, set it to 1"
            )


def _check_budget(config: RunConfig) -> None:
    budget = config.trainer.max_tokens_per_micro_batch
    if budget < config.max_model_tokens:
        raise ConfigError(
            f"trainer.max_tokens_per_micro_batch={budget} is below the longest sequence, data.max_prompt_tokens + "
            f"rollout.sampling.max_response_tokens = {config.max_model_tokens}: raise it"
        )


def _num_threads(config: RunConfig) -> int:
    if config.trainer.threads:
        return config.trainer.threads
    cores = len(os.sched_getaffinity(0))
    return cores if config.run.placement is Placement.COLOCATED else max(1, cores // 2)


async def _check_fresh(context: ServiceContext) -> None:
    """A restarted trainer has the starting weights; it must not pass them off for a later policy."""
    last = await context.bus.last(PolicyUpdate)
    if last is not None and last.policy_version > 0:
        raise BeamlineError(
            f"run {context.config.run.name} is at policy {last.policy_version}, which died with its trainer: "
            f"start a run with a new run.name from a checkpoint, or from {Path(context.config.model.path)}"
        )
