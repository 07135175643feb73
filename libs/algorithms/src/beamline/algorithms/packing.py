"""Sequences shared out by their tokens: over data-parallel ranks, and into micro-batches.

Legend: N sequences, P parts. A part is a list of indices into the sequences, in rising order.
"""

import heapq
from collections.abc import Sequence


def balance(lengths_N: Sequence[int], num_parts: int) -> list[list[int]]:
    """Split sequences into parts of nearly equal token counts (Karmarkar-Karp, largest differencing method).

    Deterministic. No part is empty while there are at least as many sequences as parts. The parts come with the
    largest token count first.

    Args:
        lengths_N: tokens of each sequence, above 0.
        num_parts: P, above 0.

    Returns:
        P parts in which each index occurs exactly once.
    """
    empty: list[tuple[int, list[int]]] = [(0, []) for _ in range(num_parts)]
    # A partial solution is P parts sorted by falling tokens. The two with the widest spread are merged, the heaviest
    # part of the one with the lightest of the other, until one is left. The index breaks ties.
    heap = [(-length, index, [(length, [index]), *empty[1:]]) for index, length in enumerate(lengths_N)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, i + j) for (a, i), (b, j) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
    parts = heap[0][2] if heap else empty
    return [sorted(indices) for _, indices in parts]


def micro_batches(lengths_N: Sequence[int], max_tokens: int, num_at_least: int = 0) -> list[list[int]]:
    """Split sequences into few, evenly filled micro-batches of at most `max_tokens` tokens.

    Args:
        lengths_N: tokens of each sequence, above 0.
        max_tokens: budget of a micro-batch.
        num_at_least: ranks that must run the same number of micro-batches give the largest number among them;
            with fewer sequences than that the last micro-batches are empty.

    Raises:
        ValueError: a sequence longer than the budget.
    """
    for index, length in enumerate(lengths_N):
        if length > max_tokens:
            raise ValueError(
                f"sequence {index} has {length} tokens, over the micro-batch budget of {max_tokens}: raise the budget"
            )
    packed = _first_fit(lengths_N, max_tokens)
    if len(packed) < num_at_least:
        return balance(lengths_N, num_at_least)
    even = balance(lengths_N, len(packed)) if packed else []
    fits = all(sum(lengths_N[i] for i in part) <= max_tokens for part in even)
    return even if fits else packed


def _first_fit(lengths_N: Sequence[int], max_tokens: int) -> list[list[int]]:
    """First-fit decreasing: at most 11/9 of the fewest possible parts, plus one."""
    parts: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths_N)), key=lambda i: (-lengths_N[i], i)):
        length = lengths_N[index]
        place = next((p for p, room in enumerate(free) if length <= room), None)
        if place is None:
            parts.append([index])
            free.append(max_tokens - length)
        else:
            parts[place].append(index)
            free[place] -= length
    return [sorted(part) for part in parts]
