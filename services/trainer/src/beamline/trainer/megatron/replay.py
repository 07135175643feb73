"""Routing replay: the experts that the engine chose, in the place of the live router's own choice.

Each micro-batch carries its routes in its packing parameters, which reach every layer in the forward pass and
again where a layer is recomputed. So nothing global has to be kept in step with the schedule, however many
micro-batches are in flight. Only the choice is replayed: gate weights come from live scores, and gradients reach the
router.

Legend: T rows of this rank, E experts, K experts a token, L layers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from beamline.trainer.batch import MicroBatch
from beamline.trainer.routing import RouteCounts


class RouteCounter:
    """Sums over micro-batches what replay did on this rank."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self._sums_L3 = torch.zeros(num_layers, 3, dtype=torch.int64, device=device)

    def add(self, layer: int, num_pairs: int, num_fallbacks: int, num_agreed: Tensor) -> None:
        self._sums_L3[layer, 0] += num_pairs
        self._sums_L3[layer, 1] += num_fallbacks
        self._sums_L3[layer, 2] += num_agreed

    def take(self) -> RouteCounts:
        """The sums over all ranks, which all have to ask; it starts again from zero.

        Every pair is on one rank: stages have their own layers, and tensor-parallel ranks their own rows.
        """
        dist.all_reduce(self._sums_L3)
        pairs_L, fallbacks_L, agreed_L = self._sums_L3.cpu().numpy().T.copy()
        self._sums_L3.zero_()
        return RouteCounts(pairs_L, fallbacks_L, agreed_L)


class Routes:
    """The routes of this rank's rows of one micro-batch.

    Args:
        ids_LTK: expert ids; None where no row has any.
        routed_T: rows that have ids; the others are routed live.
        num_pairs: rows that should have ids.
        counter: takes what each layer did, once, however often the layer is computed.
    """

    def __init__(self, ids_LTK: Tensor | None, routed_T: Tensor, num_pairs: int, counter: RouteCounter | None) -> None:
        self.ids_LTK = ids_LTK
        self.routed_T = routed_T
        self.num_pairs = num_pairs
        self.num_fallbacks = num_pairs - int(routed_T.sum()) if counter else 0
        self.counter = counter
        self._counted: set[int] = set()

    @classmethod
    def of(cls, micro_batch: MicroBatch, rows: slice, device: torch.device, counter: RouteCounter | None) -> "Routes":
        """The routes of `rows`, which may reach into padding past the last token."""
        routed = micro_batch.routed_T[rows]
        padded = np.zeros(rows.stop - rows.start, bool)
        padded[: len(routed)] = routed
        last = np.cumsum(micro_batch.lengths) - 1  # of each sequence: it predicts nothing, and so has no row
        num_pairs = len(routed) - int(((last >= rows.start) & (last < rows.stop)).sum())
        ids_LTK = None
        if micro_batch.routes_TLK is not None and routed.any():
            ids_TLK = np.zeros((len(padded), *micro_batch.routes_TLK.shape[1:]), micro_batch.routes_TLK.dtype)
            ids_TLK[: len(routed)] = micro_batch.routes_TLK[rows]
            ids_LTK = torch.from_numpy(np.ascontiguousarray(ids_TLK.swapaxes(0, 1))).to(device)
        return cls(ids_LTK, torch.from_numpy(padded).to(device), num_pairs, counter)

    def count(self, layer: int, live_TK: Tensor) -> None:
        """Compare the live choice with the routes; the second time that a layer asks, nothing happens."""
        if self.counter is None or layer in self._counted:
            return
        self._counted.add(layer)
        agreed = torch.zeros((), dtype=torch.int64, device=live_TK.device)
        if self.ids_LTK is not None:
            same_T = (self.ids_LTK[layer].long().sort(-1).values == live_TK.sort(-1).values).all(-1)
            agreed = (same_T & self.routed_T).sum()
        self.counter.add(layer, self.num_pairs, self.num_fallbacks, agreed)


@dataclass(frozen=True)
class LayerReplay:
    """What Megatron's router asks for its choice, in one layer and one micro-batch."""

    routes: Routes
    layer: int

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        live: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """scores [T, E] -> the chosen experts' scores, which carry the gradient, and their ids, each [T, K]."""
        routes = self.routes
        chosen, live_TK = live(scores, topk, num_groups, group_topk)
        routes.count(self.layer, live_TK)
        if routes.ids_LTK is None:
            return chosen, live_TK
        ids_TK = torch.where(routes.routed_T[:, None], routes.ids_LTK[self.layer].long(), live_TK)
        return scores.gather(1, ids_TK), ids_TK


@contextmanager
def replaying(moe_layer: Any, routes: Routes | None, layer: int) -> Iterator[None]:
    """While a Megatron MoE layer runs, its router takes the routes of Hugging Face layer `layer`."""
    router = moe_layer.router
    router.router_replay = None if routes is None else LayerReplay(routes, layer)
    try:
        yield
    finally:
        router.router_replay = None
