"""The trainer's parts that need torch and Megatron, put together from the run's configuration."""

import gc
import json
import math
from concurrent.futures import Executor
from pathlib import Path

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

from beamline.models.weight_files import num_elements
from beamline.protocol.adapter import adapter_shapes
from beamline.protocol.config import Placement, RunConfig
from beamline.protocol.subjects import Subjects
from beamline.runtime.adapter_merge import adapters_in
from beamline.runtime.checkpoints import root_of
from beamline.runtime.service import ServiceContext
from beamline.runtime.shm_blobs import shm_root
from beamline.trainer.commands import Join
from beamline.trainer.keeping import STATE_BYTES, KeepingSettings
from beamline.trainer.kept import AdaptersAlone, WholePolicy
from beamline.trainer.loss import policy_loss, reading, reward_penalty
from beamline.trainer.megatron import distributed
from beamline.trainer.megatron.build import DTYPES, build_model
from beamline.trainer.megatron.distributed import Layout, Ranks
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.peers import TorchPeers
from beamline.trainer.megatron.policy import MegatronPolicy
from beamline.trainer.megatron.states.choice import states_of
from beamline.trainer.outlet import Outlet
from beamline.trainer.peers import Alone
from beamline.trainer.rank import Rank, StepSettings, Tell, tell_nobody
from beamline.trainer.retention import Retention
from beamline.trainer.worker import TrainerSettings, TrainerWorker
from beamline.weights.choice import choose, free_memory_bytes, owner_of


def build_rank(
    config: RunConfig, run_dir: Path, num_threads: int, rank: int = 0, port: int = 0, tell: Tell = tell_nobody
) -> Rank:
    """The model of `model.path`, as far as it is this rank's, with its optimizer. Close it at the end.

    Weights and optimizer are then those of `trainer.resume_path`, where that is set.

    Args:
        num_threads: CPU threads of this rank.
        port: where rank 0's store listens; rank 0 takes a free one, and tells the others.

    Raises:
        ConfigError: the model, the transport of its weights, the folder of the optimizer's state, or a loss or
            advantage of the user's own cannot be used.
        WeightError: the transport cannot be opened, or the checkpoint is damaged or of another model.
    """
    settings = _step_settings(config)
    torch.set_num_threads(num_threads)
    parallel = config.trainer.parallel
    ranks = Ranks(rank, parallel.world_size, port)
    layout = Layout(tensor=parallel.tensor, expert=parallel.expert, pipeline=parallel.pipeline)
    store = distributed.open_store(ranks)
    if rank == 0 and isinstance(store, TCPStore):
        tell(Join(port=store.port))
    distributed.start(ranks, layout, store)
    path, recompute, seed = Path(config.model.path), config.trainer.recompute, config.run.seed
    model = build_model(path, layout, config.model.dtype, recompute, config.model.lora, seed)
    optimizer = AdamWSettings(
        betas=config.trainer.optimizer.betas,
        eps=config.trainer.optimizer.eps,
        weight_decay=config.trainer.optimizer.weight_decay,
        max_grad_norm=config.trainer.optimizer.max_grad_norm,
    )
    with_reference = config.algorithm.kl.coefficient > 0
    temperature = config.rollout.sampling.temperature
    policy = MegatronPolicy(model, optimizer, temperature, with_reference, states_of(config, rank))
    if config.trainer.resume_path:
        policy.load(Path(config.trainer.resume_path))  # the reference stays that of model.path
    gc.collect()
    gc.freeze()  # half a million objects of imported modules, which no later collection has to look at
    outlet = _outlet(config, run_dir, rank)
    return Rank(policy, TorchPeers() if ranks.world_size > 1 else Alone(), settings, outlet, tell)


def build_worker(context: ServiceContext, rank: Rank, thread: Executor) -> TrainerWorker:
    """The worker on the event loop's side of rank 0."""
    config = context.config
    model_dir = Path(config.model.path)
    settings = TrainerSettings(
        worker=context.worker,
        incarnation=context.incarnation,
        optimizer=config.trainer.optimizer,
        num_steps=config.trainer.num_steps,
        vocab_size=json.loads((model_dir / "config.json").read_text(encoding="utf-8"))["vocab_size"],
        keeping=_keeping(config, context.run_dir),
        colocated=config.run.placement is Placement.COLOCATED,
        model_bytes=_model_bytes(config) if config.model.lora.is_on else 0,
    )
    return TrainerWorker(settings, rank, thread, context.blobs, context.bus.publish, context.status)


def _keeping(config: RunConfig, run_dir: Path) -> KeepingSettings:
    trainer, parallel, lora = config.trainer, config.trainer.parallel, config.model.lora
    model_dir, num_trained = Path(config.model.path), _num_trained(config)
    trained_bytes = num_trained * DTYPES[config.model.dtype].itemsize
    return KeepingSettings(
        model_dir=model_dir,
        dtype=config.model.dtype,
        kept=AdaptersAlone.of(model_dir, lora) if lora.is_on else WholePolicy(model_dir, config.model.dtype),
        checkpoints=root_of(run_dir, trainer.checkpoint_path),
        exports=Path(trainer.export_path).resolve() if trainer.export_path else run_dir / "exports",
        retention=Retention(num_newest=trainer.keep_checkpoints, every=trainer.keep_every),
        layout={
            "tensor": parallel.tensor,
            "expert": parallel.expert,
            "pipeline": parallel.pipeline,
            "data": parallel.data,
        },
        optimizer=msgspec.to_builtins(trainer.optimizer),
        checkpoint_bytes=trained_bytes + num_trained * STATE_BYTES,
        export_bytes=trained_bytes + (_model_bytes(config) if lora.is_on else 0),
    )


def _outlet(config: RunConfig, run_dir: Path, rank: int) -> Outlet:
    """Sockets lie in the run's folder in shared memory, and go with it; files where the user wants them."""
    transport = _transport(config)
    directory = shm_root(Subjects(prefix=config.bus.prefix, run=config.run.name), run_dir) / "weights"
    if transport == "checkpoint":
        directory = Path(config.weights.directory) if config.weights.directory else run_dir / "weights"
    on_device = transport == "cuda_ipc"
    owner = owner_of(transport, directory, rank, torch.cuda.current_device() if on_device else 0)
    return Outlet(owner=owner, cuts=config.rollout.engine.tensor_parallel, on_device=on_device)


def _transport(config: RunConfig) -> str:
    """Ranks may differ where memory is short: a manifest says of every place what it is."""
    on_gpu = torch.cuda.is_available()
    return choose(
        config.weights.transport,
        one_host=config.bus.blob_store == "shm",
        device="cuda" if on_gpu else "cpu",
        one_device=on_gpu and torch.cuda.device_count() == 1 and config.run.placement is Placement.COLOCATED,
        num_bytes=_num_trained(config) * DTYPES[config.model.dtype].itemsize,
        free_bytes=free_memory_bytes(),
    )


def _num_trained(config: RunConfig) -> int:
    """Elements of what moves with a step: all weights, or the adapters."""
    model_dir, lora = Path(config.model.path), config.model.lora
    if not lora.is_on:
        return num_elements(model_dir)
    return sum(map(math.prod, adapter_shapes(adapters_in(model_dir, lora)).values()))


def _model_bytes(config: RunConfig) -> int:
    """Of all weights in the run's precision."""
    return num_elements(Path(config.model.path)) * DTYPES[config.model.dtype].itemsize


def _step_settings(config: RunConfig) -> StepSettings:
    return StepSettings(
        loss=policy_loss(config.algorithm),
        max_tokens=config.trainer.max_tokens_per_micro_batch,
        reading=reading(config),
        penalty=reward_penalty(config.algorithm),
        has_dropout=config.model.lora.is_on and config.model.lora.dropout > 0,
    )
