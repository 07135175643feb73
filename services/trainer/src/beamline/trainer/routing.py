"""Routed experts at the trainer's door: checked against their trajectories and the model; and what replay counted.

Legend: R rows of a group, L layers, K experts a token.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from beamline.protocol.blobs import RoutedExperts
from beamline.protocol.errors import BeamlineError


class TraceError(BeamlineError, ValueError):
    """Routed experts that do not fit their trajectories or the model."""


@dataclass(frozen=True)
class RoutingShape:
    """What a model's routed experts look like."""

    num_layers: int
    """Dense ones included: they have a slot, whose content means nothing."""
    top_k: int
    num_experts: int
    sparse_layers: tuple[int, ...]

    @classmethod
    def of(cls, model_dir: Path) -> "RoutingShape":
        """As the config.json of a Hugging Face directory says."""
        config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        num_layers = config["num_hidden_layers"]
        kinds = config.get("mlp_layer_types") or ["sparse"] * num_layers
        return cls(
            num_layers=num_layers,
            top_k=config["num_experts_per_tok"],
            num_experts=config["num_experts"],
            sparse_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse"),
        )


def traces(blob: RoutedExperts, group_id: str, lengths: Sequence[int], shape: RoutingShape) -> list[np.ndarray]:
    """Each trajectory's expert ids, [tokens - 1, L, K], as views into the blob.

    Args:
        lengths: prompt and response tokens of each trajectory.

    Raises:
        TraceError: another group's blob, or rows, layers, experts a token or ids that do not fit. It names group,
            trajectory, what was expected and what was found.
    """
    if blob.group_id != group_id:
        raise TraceError(f"routed experts of group {blob.group_id}, expected those of group {group_id}")
    name = f"routed experts of group {group_id}"
    if (blob.num_layers, blob.top_k) != (shape.num_layers, shape.top_k):
        raise TraceError(
            f"{name}: {blob.num_layers} layers of {blob.top_k} experts a token, expected {shape.num_layers} of "
            f"{shape.top_k} as the model has"
        )
    ends = np.frombuffer(blob.cu_seqlens, "<i4")
    if len(ends) - 1 != len(lengths):
        raise TraceError(f"{name}: {len(ends) - 1} trajectories, expected {len(lengths)}")
    for trajectory, (num_rows, length) in enumerate(zip(np.diff(ends), lengths, strict=True)):
        if num_rows != length - 1:
            raise TraceError(
                f"{name}, trajectory {trajectory}: {num_rows} rows, expected {length - 1} for its {length} tokens"
            )
    ids_RLK = np.frombuffer(blob.ids, "<u1" if blob.dtype == "uint8" else "<u2")
    ids_RLK = ids_RLK.reshape(-1, shape.num_layers, shape.top_k)
    _check_ids(name, ids_RLK, ends, shape)
    return [ids_RLK[start:end] for start, end in itertools.pairwise(ends)]


def _check_ids(name: str, ids_RLK: np.ndarray, ends: np.ndarray, shape: RoutingShape) -> None:
    """Every id an expert's, and no expert twice: a token that one stage left out shows as all zeros."""
    sparse_RSK = ids_RLK[:, shape.sparse_layers]
    wrong_RS = (sparse_RSK >= shape.num_experts).any(-1)
    for shift in range(1, shape.top_k):
        wrong_RS |= (sparse_RSK[..., shift:] == sparse_RSK[..., :-shift]).any(-1)
    if wrong_RS.any():
        row, place = (int(index) for index in np.argwhere(wrong_RS)[0])
        trajectory = int(np.searchsorted(ends, row, side="right")) - 1
        raise TraceError(
            f"{name}, trajectory {trajectory}: row {row - ends[trajectory]} of layer {shape.sparse_layers[place]} "
            f"has experts {sparse_RSK[row, place].tolist()}, expected {shape.top_k} different ones below "
            f"{shape.num_experts}"
        )


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
