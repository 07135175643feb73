"""Strided memory as rows of equal length and distance, which a GPU copies in one go."""

from collections.abc import Sequence


def as_rows(shape: Sequence[int], strides: Sequence[int] | None, item_bytes: int) -> tuple[int, int, int] | None:
    """An array's number of rows, bytes a row and bytes from row to row; None where it is not such a thing.

    Args:
        shape: without a 0.
        strides: in bytes, outermost first; None for a contiguous array.
    """
    run, rows, pitch = item_bytes, 1, 0
    if strides is not None:
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            if size == 1:
                continue
            if rows == 1 and stride == run:
                run *= size
            elif rows == 1:
                rows, pitch = size, stride
            elif stride == rows * pitch:
                rows *= size
            else:
                return None
    else:
        for size in shape:
            run *= size
    return (rows, run, pitch or run) if pitch >= 0 and (rows == 1 or pitch >= run) else None
