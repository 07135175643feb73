"""Where a model routes tokens to experts, and whether a trace of its choices can be one of that model's.

A trace is one trajectory's expert ids [R, L, K]. Row i was chosen for token i: by the forward whose keys and values
were used where it is a prompt token, by the forward that sampled token i + 1 where that is a response token. Dense
layers keep a slot, whose content means nothing.

Legend: R rows of a trajectory, L layers, S sparse layers among them, K experts a token.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

BEAM_DENSE_LAYERS = range(3)
"""Of a Beam model whose configuration names none."""


class TraceError(ValueError):
    """A trace that is missing, cut short, or not the model's. Names the trajectory, what was expected and found."""


def num_trace_rows(num_prompt_tokens: int, num_response_tokens: int) -> int:
    """One for each token that was read before the last was sampled; none where none was sampled."""
    return num_prompt_tokens + num_response_tokens - 1 if num_response_tokens else 0


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """What every trace of a model looks like."""

    num_layers: int
    """Dense ones included."""
    top_k: int
    num_experts: int
    sparse_layers: tuple[int, ...]
    """In rising order; none of a model without experts."""

    @classmethod
    def of(cls, model_dir: Path) -> "RoutingShape":
        """As the config.json of a Hugging Face directory says."""
        return cls.of_config(json.loads((model_dir / "config.json").read_text(encoding="utf-8")))

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "RoutingShape":
        """As a config.json says, under Beam's and Qwen3-MoE's names."""
        num_layers, num_experts = config["num_hidden_layers"], config.get("num_experts") or 0
        every = config.get("decoder_sparse_step", 1)
        dense = config.get("mlp_only_layers", BEAM_DENSE_LAYERS if config.get("model_type") == "beam" else ())
        kinds = config.get("mlp_layer_types") or [
            "sparse" if layer not in dense and (layer + 1) % every == 0 else "dense" for layer in range(num_layers)
        ]
        return cls(
            num_layers=num_layers,
            top_k=config["num_experts_per_tok"] if num_experts else 0,
            num_experts=num_experts,
            sparse_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse" and num_experts),
        )

    @property
    def dtype(self) -> str:
        """Of the ids."""
        return "uint8" if self.num_experts <= 256 else "uint16"

    def check(self, traces: "Sequence[np.ndarray | None]", num_rows: Sequence[int], where: str) -> "list[np.ndarray]":
        """A group's traces, which are whole: every row is there, and every sparse layer of it has K different experts.

        Args:
            traces: expert ids [R, L, K] of each trajectory, as they were found; None for no trace at all.
            num_rows: of each trajectory, see `num_trace_rows`.
            where: names the group.

        Returns:
            The traces; one without rows where none is needed.

        Raises:
            TraceError: rows, layers or experts are missing, too many, out of range or twice. With two experts a token
                or more, a row that a layer did not write shows as zeros.
        """
        import numpy as np  # services that only pass this module on must not wait for it

        nothing = np.empty((0, self.num_layers, self.top_k), self.dtype)
        whole = [nothing if ids is None and rows == 0 else ids for ids, rows in zip(traces, num_rows, strict=True)]
        checked = [
            self._check_form(*pair, f"{where}, trajectory {i}")
            for i, pair in enumerate(zip(whole, num_rows, strict=True))
        ]
        if checked:
            # All of them at once: one trajectory is a few kilobytes, and a call costs more than its work.
            self._check_experts(np.concatenate(checked), num_rows, where)
        return checked

    def _check_form(self, ids_RLK: "np.ndarray | None", num_rows: int, where: str) -> "np.ndarray":
        if ids_RLK is None:
            raise _error(where, f"{num_rows} rows of expert ids", "none: no routing was recorded")
        expected, found = (self.num_layers, self.top_k, self.dtype), (*ids_RLK.shape[1:], ids_RLK.dtype.name)
        if found != expected:
            raise _error(
                where, "{} layers of {} experts a token as {}".format(*expected), "{} of {} as {}".format(*found)
            )
        if len(ids_RLK) != num_rows:
            raise _error(where, f"{num_rows} rows", str(len(ids_RLK)))
        return ids_RLK

    def _check_experts(self, ids_RLK: "np.ndarray", num_rows: Sequence[int], where: str) -> None:
        import numpy as np

        sparse_RSK = ids_RLK[:, self.sparse_layers]
        sorted_RSK = np.sort(sparse_RSK, axis=-1)
        wrong_RS = (sorted_RSK >= self.num_experts).any(-1) | (sorted_RSK[..., 1:] == sorted_RSK[..., :-1]).any(-1)
        if wrong_RS.any():
            row, place = np.argwhere(wrong_RS)[0]
            ends = np.cumsum(num_rows)
            trajectory = int(np.searchsorted(ends, row, side="right"))
            experts = sparse_RSK[row, place].tolist()
            raise _error(
                f"{where}, trajectory {trajectory}",
                f"{self.top_k} different experts below {self.num_experts} in row "
                f"{row - ends[trajectory] + num_rows[trajectory]}, layer {self.sparse_layers[place]}",
                f"{experts}" if any(experts) else f"{experts}: nothing was written",
            )


def _error(where: str, expected: str, found: str) -> TraceError:
    return TraceError(f"routed experts of {where}: expected {expected}, found {found}")
