"""What `benchmarks.lora_slots` found, and the keys of the summary that come of it."""

from collections.abc import Sequence
from statistics import median

import msgspec

MIN_BYTES_RATIO = 5.0
SEEDS_DECODE_RATIO = 1.62
"""What the seeds report, of another model on a B200: told beside ours."""


class SlotSide(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine whose experts' slots have room for one rank."""

    expert_rank: int
    expert_bytes: int
    """Of all slots."""
    dense_bytes: int
    num_blocks: int
    """Of the key-value cache, which has what the slots leave."""
    tokens_per_s: list[float]
    """Sampled, round by round."""


class SlotFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome; keys of the summary."""

    lora_slot_bytes_ratio: float
    """Of the experts' slots: sized by the dense layers' rank, over sized by their own."""
    lora_decode_ratio: float
    """Sampled tokens a second with slots of the experts' own rank, over those with the larger ones; of the medians."""
    lora_kv_blocks_gained: int
    lora_slots: list[SlotSide]
    """The larger ones first."""


def figures_of(full: SlotSide, own: SlotSide) -> SlotFigures:
    return SlotFigures(
        lora_slot_bytes_ratio=full.expert_bytes / own.expert_bytes,
        lora_decode_ratio=median(own.tokens_per_s) / median(full.tokens_per_s),
        lora_kv_blocks_gained=own.num_blocks - full.num_blocks,
        lora_slots=[full, own],
    )


def rows(figures: SlotFigures) -> Sequence[tuple[str, str, str]]:
    """Of the table: name, figure, and its goal or what it is made of."""
    full, own = figures.lora_slots
    return [
        (
            "lora_slot_bytes_ratio",
            f"{figures.lora_slot_bytes_ratio:.2f}",
            f"at least {MIN_BYTES_RATIO:g}: {_mib(full.expert_bytes)} at rank {full.expert_rank}, "
            f"{_mib(own.expert_bytes)} at rank {own.expert_rank}; other layers {_mib(own.dense_bytes)} in both",
        ),
        (
            "lora_kv_blocks_gained",
            f"{figures.lora_kv_blocks_gained}",
            f"{own.num_blocks} blocks of the key-value cache instead of {full.num_blocks}",
        ),
        (
            "lora_decode_ratio",
            f"{figures.lora_decode_ratio:.2f}",
            f"{median(own.tokens_per_s):,.0f} tokens/s beside {median(full.tokens_per_s):,.0f}; the seeds have "
            f"{SEEDS_DECODE_RATIO} on a B200",
        ),
    ]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
