"""A rank of a real engine whose routed experts can be made to go missing."""

from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer
from vllm.sequence import IntermediateTensors

from beamline.rollout.route_capture import ROWS
from loaded_weights import WatchedWorker


class LossyWorker(WatchedWorker):
    """Loses nothing until it is told to."""

    _unsent: RemovableHandle | None = None

    def lose_rows(self, fault: str) -> None:
        """From here on: "first" or "last" stage writes none of its rows, what the first writes is "unsent", or ""."""
        group, model = get_pp_group(), self.model_runner.model
        writes = not (fault == "first" and group.is_first_rank) and not (fault == "last" and group.is_last_rank)
        bind_routed_experts_capturer(model, cast(Any, self._routes if writes else self))
        if self._unsent is not None:
            self._unsent.remove()
        self._unsent = model.register_forward_hook(_drop_rows) if fault == "unsent" else None

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Instead of the capture that writes the rows down."""


def _drop_rows(_model: torch.nn.Module, _args: Any, output: Any) -> None:
    if isinstance(output, IntermediateTensors):
        output.tensors.pop(ROWS, None)
