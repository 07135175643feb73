"""What `benchmarks.adapter_swap` found, and the keys of the summary that come of it."""

from collections.abc import Sequence

import msgspec

MAX_PAUSE_S = 0.1
"""Of the 99th percentile, in every mode."""


class Swaps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All swaps of one mode, seconds. A pause is the longest time without a sampled token, of any request, from the
    first word of a version to the engine until the first token after it is served."""

    pause: str
    """`weights.pause`."""
    num_under_way: int
    """Requests, at any time."""
    num_swaps: int
    pause_p50_s: float
    pause_p99_s: float
    step_p50_s: float
    """Between two sampled tokens while nothing is swapped."""
    step_p99_s: float
    swap_p50_s: float
    """To fetch, check, write into a slot and serve."""
    swap_p99_s: float
    adapter_bytes: int
    model_bytes: int
    """That a sync of all weights would move."""


class SwapFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome; keys of the summary."""

    adapter_swap_pause_p99_ms: float
    """Of the mode that pauses longest."""
    adapter_bytes_share: float
    """Of the full model's."""
    adapter_swaps: list[Swaps]


def figures_of(modes: list[Swaps]) -> SwapFigures:
    return SwapFigures(
        adapter_swap_pause_p99_ms=1000 * max(mode.pause_p99_s for mode in modes),
        adapter_bytes_share=max(mode.adapter_bytes / mode.model_bytes for mode in modes),
        adapter_swaps=modes,
    )


def rows(figures: SwapFigures) -> Sequence[tuple[str, str, str]]:
    """The table's lines."""
    return [
        (
            "adapter_swap_pause_p99_ms",
            f"{figures.adapter_swap_pause_p99_ms:.0f}",
            f"of no token, from {figures.adapter_swaps[0].num_swaps} swaps; goal < {1000 * MAX_PAUSE_S:.0f}",
        ),
        ("adapter_bytes_share", f"{figures.adapter_bytes_share:.1%}", "of what a sync of all weights moves"),
        *((f"  {mode.pause}", f"{1000 * mode.pause_p99_s:.0f} ms", line(mode)) for mode in figures.adapter_swaps),
    ]


def line(mode: Swaps) -> str:
    """One mode, in words."""
    return (
        f"{mode.pause:<8} {mode.num_swaps} swaps under {mode.num_under_way} requests: no token for "
        f"{1000 * mode.pause_p50_s:.0f} ms (p50), {1000 * mode.pause_p99_s:.0f} ms (p99), otherwise "
        f"{1000 * mode.step_p50_s:.0f} and {1000 * mode.step_p99_s:.0f} ms; a swap takes "
        f"{1000 * mode.swap_p50_s:.0f} ms (p50), {1000 * mode.swap_p99_s:.0f} ms (p99); "
        f"{mode.adapter_bytes:,} bytes, {100 * mode.adapter_bytes / mode.model_bytes:.1f} % of the model's"
    )
