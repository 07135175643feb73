"""What `benchmarks.disk_adam` found, and the keys of the summary that come of it."""

from collections.abc import Sequence

import msgspec

SIZES = (50_000_000, 200_000_000)
LARGEST = 800_000_000
"""Only where it is asked for: 20 GB of disk, 13 GB of memory and some minutes."""
KEY_SIZE = 200_000_000
BYTES_MOVED = 24
"""Of a parameter in a step: main weight and both moments, read and written."""
MAX_VS_LIMIT = 1.2
MAX_BUCKETS = 3.0


class DiskStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One size; medians over rounds, seconds."""

    num_params: int
    bucket_bytes: int
    step_s: float
    """Of DiskAdamW, norm and flip included."""
    disk_s: float
    """Of the same bytes read from and written to the same two files by two threads that do nothing else, O_DIRECT."""
    memory_s: float
    """Of torch's fused AdamW with everything in memory, norm and clipping included."""
    vs_limit: float
    """step_s over the larger of the other two, round by round."""
    first_peak_bytes: int
    """The most that was resident until the second step, above parameters and gradients."""
    peak_bytes: int
    """The same until the last step."""

    @property
    def buckets(self) -> float:
        """Peak in buckets."""
        return self.peak_bytes / self.bucket_bytes

    @property
    def rate(self) -> float:
        """Bytes read and written per second of a step."""
        return self.num_params * BYTES_MOVED / self.step_s


class DiskFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome; keys of the summary."""

    disk_adam_vs_limit: float
    """At 200 million parameters: a step's time over the larger of what disk and processor need alone."""
    disk_adam_buckets: float
    """The most that was resident above parameters and gradients, at any size, in buckets."""
    disk_adam: list[DiskStep]


def figures_of(steps: list[DiskStep]) -> DiskFigures:
    """Raises ValueError: 200 million parameters were left out."""
    found = {step.num_params: step for step in steps}
    if KEY_SIZE not in found:
        raise ValueError(f"{KEY_SIZE} parameters were left out: there is not disk or memory enough")
    return DiskFigures(
        disk_adam_vs_limit=found[KEY_SIZE].vs_limit,
        disk_adam_buckets=max(step.buckets for step in steps),
        disk_adam=steps,
    )


def rows(figures: DiskFigures) -> Sequence[tuple[str, str, str]]:
    """The table's lines."""
    return [
        ("disk_adam_vs_limit", f"{figures.disk_adam_vs_limit:.2f} x", f"goal: at most {MAX_VS_LIMIT} x"),
        ("disk_adam_buckets", f"{figures.disk_adam_buckets:.2f}", f"goal: at most {MAX_BUCKETS:.0f}"),
        *((f"  {step.num_params // 10**6} M", f"{step.vs_limit:.2f} x", line(step)) for step in figures.disk_adam),
    ]


def line(step: DiskStep) -> str:
    """Seconds, rate and memory."""
    return (
        f"step {step.step_s:.2f} s ({step.step_s / step.num_params * 1e9:.1f} ns a parameter, {step.rate / 1e9:.2f} "
        f"GB/s); disk alone {step.disk_s:.2f} s, in memory {step.memory_s:.2f} s; {step.buckets:.2f} buckets resident, "
        f"{(step.peak_bytes - step.first_peak_bytes) / step.bucket_bytes:.2f} more than at first"
    )
