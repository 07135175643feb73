"""The experts that an engine's routers chose, kept beside the key-value cache and handed out with the sampled tokens.

Every stage of a pipeline runs one of these. Its routers write into `rows`, a buffer for the tokens of one step; a stage
receives the rows of those before it in that buffer, adds its own layers and sends all of them on. The last stage keeps
each row under its token's slot of the key-value cache. So a prompt that is found in the cache finds the rows of the
forward that filled it, and a block that is given away loses its rows with its keys and values. A request's prompt rows
are read from there when it samples its first token; from then on each step's own row is enough.

vLLM has a connector for this that is not used: it asks for another model runner than CPUs have, for prefix caching and
for a single stage, and ends the engine where a request is put back and computed again.

Legend: T tokens of a step, L layers, K experts a token.
"""

from typing import Any, cast

import numpy as np
import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.sequence import IntermediateTensors
from vllm.v1.kv_cache_interface import FullAttentionSpec

from beamline.rollout.late_outputs import StepNotes

ROWS = "routed_experts"
"""Key of the rows among the tensors that a stage sends to the next one."""


class RouteCapture:
    """Hooks into the routers and the forward of one worker's model.

    Args:
        runner: vLLM's model runner, its model loaded.
    """

    def __init__(self, runner: Any) -> None:
        config = runner.model_config
        num_experts, top_k = config.get_num_experts(), config.get_num_experts_per_tok()
        self._runner = runner
        self._dtype = np.dtype(np.uint8 if num_experts <= 256 else np.uint16)
        self._is_last_stage = get_pp_group().is_last_rank
        self._answers = self._is_last_stage and get_tp_group().is_first_rank
        # Not every backend that joins stages has unsigned types beyond bytes.
        self.rows = torch.zeros(
            (runner.max_num_tokens, config.get_total_num_hidden_layers(), top_k),
            dtype=torch.uint8 if num_experts <= 256 else torch.int32,
            device=runner.device,
        )
        self._stored: np.ndarray | None = None
        self._noted: tuple[np.ndarray, dict[str, np.ndarray]] | None = None
        if any(isinstance(module, MoERunner) for module in runner.model.modules()):
            bind_routed_experts_capturer(runner.model, cast(Any, self))
        runner.model.register_forward_hook(self._after_forward)

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """What vLLM's routers call with the experts [T, K] of one layer."""
        self.rows[: len(topk_ids), layer_id] = topk_ids

    def take(self, policy_versions: list[int]) -> StepNotes:
        """What is to be said of the step whose forward has just run, by policies of these versions."""
        noted, self._noted = self._noted, None
        return StepNotes(policy_versions, *noted) if noted else StepNotes(policy_versions)

    def _after_forward(self, _model: torch.nn.Module, _args: Any, output: Any) -> None:
        starts = self._runner.query_start_loc.np[: self._runner.input_batch.num_reqs + 1]
        rows = self.rows[: starts[-1]]
        if not self._is_last_stage:
            assert isinstance(output, IntermediateTensors)
            output.tensors[ROWS] = rows.clone()
        elif self._answers:
            self._noted = self._keep(rows.cpu().numpy().astype(self._dtype), starts)
        # What a stage or layer does not write stays zero, and is refused as such.
        rows.zero_()

    def _keep(self, rows_TLK: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Store the step's rows; returns those of the last tokens, and of the prompts that are complete."""
        batch, num_reqs = self._runner.input_batch, len(starts) - 1
        group = self._full_attention_group()
        table = batch.block_table[group]
        if self._stored is None:
            num_slots = self._runner.kv_cache_config.num_blocks * (
                self._runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
            )
            self._stored = np.zeros((num_slots, *rows_TLK.shape[1:]), self._dtype)
        self._stored[table.slot_mapping.gpu[: len(rows_TLK)].cpu().numpy()] = rows_TLK
        lengths = batch.num_computed_tokens_cpu[:num_reqs] + np.diff(starts)
        firsts = np.flatnonzero(
            (lengths == batch.num_prompt_tokens[:num_reqs]) & ~self._runner.discard_request_mask.np[:num_reqs]
        )
        prompts: dict[str, np.ndarray] = {}
        for index in firsts:
            positions = np.arange(lengths[index])
            blocks = table.get_numpy_array()[index]
            slots = blocks[positions // table.block_size] * table.block_size + positions % table.block_size
            prompts[batch.req_ids[index]] = self._stored[slots]
        return rows_TLK[starts[1:] - 1], prompts

    def _full_attention_group(self) -> int:
        """Of the caches, one that holds every token of a request: others drop what has left a sliding window."""
        for index, group in enumerate(self._runner.kv_cache_config.kv_cache_groups):
            if isinstance(group.kv_cache_spec, FullAttentionSpec):
                return index
        raise ValueError("routing replay needs a layer of full attention: set algorithm.routing_replay=false")
