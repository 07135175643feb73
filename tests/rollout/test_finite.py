"""Infinity and what is no number are found wherever they are, in every type that adapters come in."""

import numpy as np
import pytest
import torch

from beamline.rollout.lora.finite import is_finite

DTYPES = ["float32", "float16", "bfloat16"]


def bytes_of(values: list[float], dtype: str) -> np.ndarray:
    return torch.tensor(values).to(getattr(torch, dtype)).view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_finite(dtype: str):
    largest = torch.finfo(getattr(torch, dtype)).max
    assert is_finite(bytes_of([0.0, -0.0, 1.0, -2.5, largest, -largest, 1e-6], dtype), dtype)
    assert is_finite(bytes_of([], dtype), dtype)


def test_a_type_without_infinity_has_what_is_no_number():
    assert is_finite(bytes_of([1.0, 448.0], "float8_e4m3fn"), "float8_e4m3fn")
    assert not is_finite(bytes_of([1.0, float("nan")], "float8_e4m3fn"), "float8_e4m3fn")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", [0, 3, 6])
def test_others_are_found(dtype: str, value: float, position: int):
    values = [1.0] * 7
    values[position] = value
    assert not is_finite(bytes_of(values, dtype), dtype)
