"""The trainer's parts that need torch and Megatron, put together from the run's configuration."""

import gc
import json
from concurrent.futures import Executor
from pathlib import Path

import torch

from beamline.algorithms.losses import Clip
from beamline.protocol.config import Placement, RunConfig
from beamline.runtime.service import ServiceContext
from beamline.trainer.megatron import distributed
from beamline.trainer.megatron.build import build_model
from beamline.trainer.megatron.distributed import Layout, Ranks
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.policy import MegatronPolicy
from beamline.trainer.policy import Policy
from beamline.trainer.worker import TrainerSettings, TrainerWorker
from beamline.weights.shm import ShmExporter


def build_policy(config: RunConfig, num_threads: int) -> Policy:
    """The model of `model.path` with its optimizer. Raises ConfigError where it cannot be used."""
    torch.set_num_threads(num_threads)
    optimizer = config.trainer.optimizer
    settings = AdamWSettings(
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
    )
    layout = Layout()
    distributed.start(Ranks(), layout)
    model = build_model(Path(config.model.path), layout, config.model.dtype)
    policy = MegatronPolicy(model, settings, config.rollout.sampling.temperature)
    gc.collect()
    gc.freeze()  # half a million objects of imported modules, which no later collection has to look at
    return policy


def build_worker(context: ServiceContext, policy: Policy, thread: Executor, weights: Path) -> TrainerWorker:
    """The worker; `weights` is the folder in shared memory through which policies reach the engines."""
    config = context.config
    model_dir = Path(config.model.path)
    checkpoints = (
        Path(config.trainer.checkpoint_path) if config.trainer.checkpoint_path else context.run_dir / "checkpoints"
    )
    algorithm = config.algorithm
    settings = TrainerSettings(
        worker=context.worker,
        incarnation=context.incarnation,
        clip=Clip(algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip),
        optimizer=config.trainer.optimizer,
        num_steps=config.trainer.num_steps,
        max_tokens=config.trainer.max_tokens_per_micro_batch,
        vocab_size=json.loads((model_dir / "config.json").read_text(encoding="utf-8"))["vocab_size"],
        model_dir=model_dir,
        dtype=config.model.dtype,
        checkpoints=checkpoints,
        colocated=config.run.placement is Placement.COLOCATED,
    )
    return TrainerWorker(
        settings, policy, thread, ShmExporter(weights), context.blobs, context.bus.publish, context.status
    )
