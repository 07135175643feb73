"""Routed experts at the trainer's door: checked against their trajectories and the model; and what replay counted.

Legend: R rows of a group, L layers, K experts a token.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from beamline.models.routing import RoutingShape, TraceError
from beamline.protocol.blobs import RoutedExperts
from beamline.protocol.errors import BlobError


def traces(blob: RoutedExperts, group_id: str, num_rows: Sequence[int], shape: RoutingShape) -> list[np.ndarray]:
    """Each trajectory's expert ids, [its rows, L, K], as views into the blob.

    Args:
        num_rows: of each trajectory, see `num_trace_rows`.

    Raises:
        BlobError: another group's blob, or rows, layers, experts a token or ids that do not fit. It names group,
            trajectory, what was expected and what was found.
    """
    name = f"group {group_id}"
    if blob.group_id != group_id:
        raise BlobError(f"routed experts of group {blob.group_id}, expected those of {name}")
    ends = np.frombuffer(blob.cu_seqlens, "<i4")
    if len(ends) - 1 != len(num_rows):
        raise BlobError(f"routed experts of {name}: expected {len(num_rows)} trajectories, found {len(ends) - 1}")
    ids_RLK = np.frombuffer(blob.ids, "<u1" if blob.dtype == "uint8" else "<u2")
    ids_RLK = ids_RLK.reshape(ends[-1], blob.num_layers, blob.top_k)
    try:
        return shape.check([ids_RLK[start:end] for start, end in itertools.pairwise(ends)], num_rows, name)
    except TraceError as error:
        raise BlobError(str(error)) from error


@dataclass(frozen=True)
class RouteCounts:
    """(Token, layer) pairs of sparse layers whose token predicts another one; each int64 [L], over all ranks."""

    pairs_L: np.ndarray
    fallbacks_L: np.ndarray
    """Routed live, for there was no row to replay."""
    agreed_L: np.ndarray
    """Replayed, and the live router would have chosen the same experts."""

    @classmethod
    def none(cls) -> "RouteCounts":
        """Of a policy without experts."""
        return cls(*np.zeros((3, 0), np.int64))

    def metrics(self) -> dict[str, float]:
        """Shares, under the metric names of the run's summary; of what was not counted there is none."""
        replayed_L = self.pairs_L - self.fallbacks_L
        found: dict[str, float] = {}
        if self.pairs_L.any():
            found["routing/fallback_share"] = float(self.fallbacks_L.sum() / self.pairs_L.sum())
        if replayed_L.any():
            found["routing/agreement"] = float(self.agreed_L.sum() / replayed_L.sum())
        for layer in np.flatnonzero(replayed_L):
            found[f"routing/agreement_layer_{layer}"] = float(self.agreed_L[layer] / replayed_L[layer])
        return found
