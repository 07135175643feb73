"""A Megatron model, sharded by a layout, from a Hugging Face directory."""

from pathlib import Path
from typing import Any

import torch
from megatron.bridge.models.conversion.auto_bridge import AutoBridge
from megatron.bridge.models.qwen import qwen3_moe_bridge  # noqa: F401  registers itself with AutoBridge
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.router import Router

from beamline.models import beam_config
from beamline.protocol.errors import ConfigError
from beamline.protocol.lora_config import LoraSection
from beamline.trainer.megatron import beam_bridge  # noqa: F401  registers itself with AutoBridge
from beamline.trainer.megatron.distributed import Layout
from beamline.trainer.megatron.lora import with_adapters
from beamline.trainer.megatron.model import Model
from beamline.trainer.megatron.qwen3_moe_spec import qwen3_moe_block_spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_model(
    path: Path,
    layout: Layout,
    dtype: str = "float32",
    recompute: bool = False,
    lora: LoraSection | None = None,
    seed: int = 0,
) -> Model:
    """Build and load the model of `path`, which `check_model_dir` has seen. `distributed.start` comes first.

    Args:
        recompute: keep each layer's input alone, and compute the layer again in the backward pass.
        lora: adapters to train in the place of the weights, where it is on.
        seed: of the adapters' first values, which are the same in every layout.

    Raises:
        ConfigError: naming what is missing or not supported.
    """
    beam_config.register()
    bridge = AutoBridge.from_hf_pretrained(path)
    model = unloaded_model(bridge, path, layout, dtype, recompute)
    module = model.module
    _fill_with_nan(module)
    bridge.load_hf_weights([module])
    _check_all_loaded(module, path)
    module.post_process = False  # the output layer runs in head.py, in chunks
    return with_adapters(model, lora, seed) if lora is not None and lora.is_on else model


def unloaded_model(
    bridge: AutoBridge, path: Path, layout: Layout, dtype: str = "float32", recompute: bool = False
) -> Model:
    """The same without its weights, which are on the device of the context: on torch's meta device none are needed.

    Raises:
        ConfigError: a type that is not supported.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype={dtype!r}: use one of {', '.join(DTYPES)}")
    provider = bridge.to_megatron_provider(load_weights=False)
    _configure(provider, layout, DTYPES[dtype])
    if recompute:
        provider.recompute_granularity, provider.recompute_method = "full", "uniform"
        provider.recompute_num_layers = 1
    provider.finalize()
    groups = provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    model_parallel_cuda_manual_seed(0)
    module = provider.provide()
    _keep_router_float32(module)
    return Model(bridge, module, module.config, groups, path)


def _configure(provider: Any, layout: Layout, dtype: torch.dtype) -> None:
    """One configuration for CPU and GPU: eager modules, packed sequences, gradients summed by us."""
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pipeline,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": 1,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "transformer_impl": "local",
        "attention_backend": AttnBackend.unfused,  # attention is ours; this keeps Megatron from picking another
        "moe_grouped_gemm": False,
        # Micro-batches differ in length, between ranks too: Megatron allows that with all-to-all alone. A single
        # rank has no one to exchange with, and the other dispatcher is the cheaper one for it.
        "moe_token_dispatcher_type": "alltoall" if layout.is_parallel else "allgather",
        "variable_seq_lengths": layout.is_parallel,
        "moe_permute_fusion": False,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,
        "batch_p2p_comm": torch.cuda.is_available(),
        "calculate_per_token_loss": True,  # our loss is already divided by the mini-batch's tokens
        "position_embedding_type": "none",
    }
    for name, value in settings.items():
        setattr(provider, name, value)
    if hasattr(provider, "transformer_layer_spec"):
        provider.transformer_layer_spec = qwen3_moe_block_spec


def _keep_router_float32(module: Any) -> None:
    """Megatron casts the router's weight to the model's type; Beam's is float32."""
    for part in module.modules():
        if isinstance(part, Router) and part.config.moe_router_dtype == "fp32":
            part.weight.data = part.weight.data.float()


def _fill_with_nan(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.fill_(float("nan"))


def _check_all_loaded(module: Any, path: Path) -> None:
    missing = [name for name, parameter in module.named_parameters() if parameter.isnan().any()]
    if missing:
        raise ConfigError(
            f"{path} has no finite weights for {', '.join(missing[:5])} ({len(missing)} parameters in all)"
        )
