"""What `benchmarks.weights` found, and the keys of the summary that come of it."""

from collections.abc import Sequence

import msgspec

SIZES = {"4 MB": 4_000_000, "256 MB": 256_000_000, "1 GiB": 1 << 30, "4 GB": 4_000_000_000}
FETCH = {"shm": False, "nixl": True, "checkpoint": False}
"""Whether fetching moves bytes: the others' are read where they lie."""
KEY_SIZE = "1 GiB"
MIN_SHM, MIN_NIXL = 0.8, 0.4


class Moved(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One transport at one size; medians over rounds, seconds."""

    transport: str
    size: str
    export_s: float
    export_memcpy_s: float
    """Of the same arrays, in the owner."""
    export_vs_memcpy: float
    """The export's rate as a share of memcpy's, round by round."""
    fetch_s: float
    """Attach and fill."""
    verify_s: float
    fetch_memcpy_s: float
    """Of as many bytes, in the reader."""
    fetch_vs_memcpy: float | None
    """None where fetching moves nothing."""
    owner_base_bytes: int
    """Resident in the owner before the first export, the model included."""
    owner_peak_bytes: int
    """The most that was ever resident there."""

    @property
    def num_bytes(self) -> int:
        return SIZES[self.size]

    @property
    def grown(self) -> float:
        """What exporting added to the owner, in multiples of the model: the transport's two policies, and no more."""
        return (self.owner_peak_bytes - self.owner_base_bytes) / self.num_bytes


class WeightFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome; keys of the summary."""

    weights_shm_vs_memcpy: float
    """Rate at which 1 GiB is exported to shared memory, checksums included, as a share of memcpy's."""
    weights_nixl_vs_memcpy: float
    """Rate at which 1 GiB is fetched from another process, as a share of memcpy's."""
    weights: list[Moved]


def figures_of(moved: list[Moved]) -> WeightFigures:
    """Raises ValueError: 1 GiB was left out."""
    found = {each.transport: each for each in moved if each.size == KEY_SIZE}
    if not {"shm", "nixl"} <= found.keys():
        raise ValueError(f"{KEY_SIZE} by shm and nixl was left out: there is not memory enough")
    nixl = found["nixl"].fetch_vs_memcpy
    assert nixl is not None
    return WeightFigures(
        weights_shm_vs_memcpy=found["shm"].export_vs_memcpy, weights_nixl_vs_memcpy=nixl, weights=moved
    )


def rows(figures: WeightFigures) -> Sequence[tuple[str, str, str]]:
    """The table's lines."""
    return [
        ("weights_shm_vs_memcpy", f"{figures.weights_shm_vs_memcpy:.2f} x", f"goal: at least {MIN_SHM} x"),
        ("weights_nixl_vs_memcpy", f"{figures.weights_nixl_vs_memcpy:.2f} x", f"goal: at least {MIN_NIXL} x"),
        *((f"  {each.transport}", f"{each.export_vs_memcpy:.2f} x", line(each)) for each in figures.weights),
    ]


def line(moved: Moved) -> str:
    """Seconds and rates."""

    def rate(seconds: float) -> str:
        return f"{seconds * 1e3:9.2f} ms {moved.num_bytes / seconds / 1e9:6.2f} GB/s"

    fetched = f"({moved.fetch_vs_memcpy:.2f} of memcpy)" if moved.fetch_vs_memcpy else "(nothing to move)"
    return (
        f"{moved.transport:<11}{moved.size:>7}  export {rate(moved.export_s)}, memcpy {rate(moved.export_memcpy_s)} "
        f"({moved.export_vs_memcpy:.2f} of memcpy); fetch {moved.fetch_s * 1e3:9.2f} ms {fetched}, memcpy "
        f"{rate(moved.fetch_memcpy_s)}, verify {rate(moved.verify_s)}; owner grew by {moved.grown:.2f} models"
    )
