"""How vLLM is set up: its processes, and what it is told once at its start."""

import ctypes
import signal
from pathlib import Path
from typing import Any, cast

from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.config.kernel import IrOpPriorityConfig
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from beamline.protocol.config import EngineSection
from beamline.rollout import cpu_norm
from beamline.rollout.late_outputs import LateOutputsScheduler
from beamline.rollout.lora.budget import SlotPlan
from beamline.rollout.weight_loader import LOAD_FORMAT

WORKER = "beamline.rollout.engine_worker.EngineWorker"
"""Class of a rank."""

_PR_SET_PDEATHSIG = 1


class InProcessExecutor(UniProcExecutor):
    """Runs the worker inside the engine core's process, and that process no longer than this one.

    The string "uni" would mean the same but for that, and vLLM turns it into a further process on a CPU.
    """

    def _init_executor(self) -> None:
        _end_with_parent()
        super()._init_executor()


class RanksExecutor(MultiprocExecutor):
    """Runs a process a rank, and all of them no longer than this one."""

    def _init_executor(self) -> None:
        _end_with_parent()
        super()._init_executor()


def engine_args(
    model_path: Path,
    dtype: str,
    max_model_tokens: int,
    config: EngineSection,
    settings: dict[str, Any],
    slots: SlotPlan | None,
) -> AsyncEngineArgs:
    """Arguments of an engine; `settings` are for its ranks. Raises ConfigError where `slots` leave no memory."""
    single, cpu = config.tensor_parallel * config.pipeline_parallel == 1, current_platform.is_cpu()
    return AsyncEngineArgs(
        model=str(model_path),
        skip_tokenizer_init=True,
        dtype=cast(Any, dtype),
        load_format=LOAD_FORMAT,
        max_model_len=max_model_tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_cache_memory_bytes=slots.kv_cache_bytes(config) if slots else config.kv_cache_mib << 20,
        block_size=config.block_size,
        enable_prefix_caching=config.prefix_caching,
        tensor_parallel_size=config.tensor_parallel,
        pipeline_parallel_size=config.pipeline_parallel,
        distributed_executor_backend=InProcessExecutor if single and cpu else RanksExecutor,
        worker_cls=WORKER,
        enable_lora=slots is not None,
        max_loras=slots.num_slots if slots else 1,
        max_lora_rank=cast(Any, slots.dense_rank if slots else 1),
        additional_config={**settings, "lora": slots and slots.settings},
        scheduler_cls=LateOutputsScheduler,
        async_scheduling=False,
        logprobs_mode="processed_logprobs",
        hf_overrides={"head_dtype": "float32"},  # as in the trainer: rounded logits are most of a bfloat16 gap
        enforce_eager=cpu,
        ir_op_priority=IrOpPriorityConfig(rms_norm=[cpu_norm.PROVIDER] if cpu else []),
        # A block table of its own for the sliding layers saves memory where contexts are long; on a CPU keeping two
        # costs a tenth of the decoding time.
        disable_hybrid_kv_cache_manager=cpu,
    )


def end_deadline_s(config: VllmConfig) -> float | None:
    """How long an engine core may take to end before it is killed; None stands for vLLM's own choice.

    A core that has no ranks beside it, on a CPU, holds nothing but memory of its own. Left to itself it walks every
    object that it was forked with, twice, before it ends: more than a second.
    """
    alone = config.parallel_config.world_size == 1
    return 0.0 if alone and current_platform.is_cpu() else None


def _end_with_parent() -> None:
    """Make this process, the engine core, end when its parent does."""
    # A forked process still writes its signals into its parent's event loop: its own end would end the service.
    signal.set_wakeup_fd(-1)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
