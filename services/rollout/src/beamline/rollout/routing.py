"""Where a model routes tokens to experts, and whether a trace of its choices can be one of that model's.

Legend: R rows (tokens that were read), L layers, K experts a token.
"""

from typing import TYPE_CHECKING

import msgspec

from beamline.protocol.errors import Rejected

if TYPE_CHECKING:
    import numpy as np

FAULT = "routed_experts"
"""Kind of the failure of a group whose trace cannot be replayed."""


class RoutedTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Expert ids of one trajectory, [prompt + response - 1, layers, top_k], dense layers keeping a slot of zeros.

    Row i was chosen for token i: by the forward whose keys and values were used where it is a prompt token, by the
    forward that sampled token i + 1 where that is a response token.
    """

    num_layers: int
    top_k: int
    dtype: str
    """uint8 up to 256 experts, uint16 above."""
    ids: bytes

    @classmethod
    def of(cls, ids_RLK: "np.ndarray") -> "RoutedTrace":
        """The trace of an array of unsigned integers."""
        _, num_layers, top_k = ids_RLK.shape
        return cls(num_layers=num_layers, top_k=top_k, dtype=ids_RLK.dtype.name, ids=ids_RLK.tobytes())


class RoutingLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What every trace of a model must look like."""

    num_experts: int
    top_k: int
    sparse_layers: tuple[bool, ...]
    """One a layer; a dense layer has no experts."""

    @property
    def num_layers(self) -> int:
        return len(self.sparse_layers)

    @property
    def dtype(self) -> str:
        return "uint8" if self.num_experts <= 256 else "uint16"

    def check(self, trace: RoutedTrace | None, num_rows: int, where: str) -> RoutedTrace:
        """The trajectory's trace, which is whole.

        Args:
            trace: what the engine handed out.
            num_rows: prompt + response - 1 of the trajectory.
            where: names group and trajectory.

        Raises:
            Rejected: rows, layers or experts are missing, too many or out of range; the text names expected and found.
        """
        import numpy as np  # the entry point must not wait for it

        if trace is None:
            raise _fault(where, f"{num_rows} rows of expert ids", "none: the engine recorded no routing")
        expected, found = (self.num_layers, self.top_k, self.dtype), (trace.num_layers, trace.top_k, trace.dtype)
        if found != expected:
            raise _fault(where, "{} layers of {} experts as {}".format(*expected), "{} of {} as {}".format(*found))
        row_bytes = self.num_layers * self.top_k * np.dtype(self.dtype).itemsize
        if len(trace.ids) != num_rows * row_bytes:
            raise _fault(where, f"{num_rows} rows of {row_bytes} bytes", f"{len(trace.ids) / row_bytes:g}")
        ids_RLK = np.frombuffer(trace.ids, self.dtype).reshape(num_rows, self.num_layers, self.top_k)
        if ids_RLK.size and ids_RLK.max() >= self.num_experts:
            row, layer, _ = np.argwhere(ids_RLK >= self.num_experts)[0]
            raise _fault(
                where,
                f"expert ids below {self.num_experts}",
                f"{ids_RLK[row, layer].max()} in row {row}, layer {layer}",
            )
        # A token's experts differ, so that with two or more of them zeros alone mean that nothing was written.
        if self.top_k > 1:
            unwritten_RL = ~ids_RLK.any(-1) & np.array(self.sparse_layers)
            if unwritten_RL.any():
                row, layer = np.argwhere(unwritten_RL)[0]
                raise _fault(where, f"{self.top_k} different experts in row {row}, layer {layer}", "zeros: no choice")
        return trace


def _fault(where: str, expected: str, found: str) -> Rejected:
    return Rejected(FAULT, f"routed experts of {where}: expected {expected}, found {found}")
