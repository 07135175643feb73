"""Causes from readings: the trainer's of a healthy run serve, and the engine's log-probabilities are replaced."""

import msgspec
import numpy as np
import pytest

from beamline.protocol import doctor
from beamline.protocol.doctor import Recomputed
from doctor_cases import Examined, judge, sampled_earlier


def column(recomputed: Recomputed, name: str) -> np.ndarray:
    return np.frombuffer(recomputed.readings[name], "<f4").astype(np.float64)


@pytest.fixture(scope="module")
def recomputed(healthy: Examined) -> Recomputed:
    return healthy.run.readings


@pytest.fixture(scope="module")
def noise(recomputed: Recomputed) -> np.ndarray:
    """Of rounding's sizes, in another order: nothing to do with it."""
    rounding = column(recomputed, "bfloat16/replay") - column(recomputed, "float32/replay")
    return np.random.default_rng(0).permutation(rounding)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (doctor.TEMPERATURE_BEFORE_SOFTCAP, "temperature 0.7 applied before the softcap"),
        (doctor.TEMPERATURE_IGNORED, "temperature 1 in the place of 0.7"),
    ],
)
def test_each_mistake_with_the_temperature_is_told_from_the_other(
    healthy: Examined, recomputed: Recomputed, mistake: str, words: str
):
    run = healthy.run.copy(mistake.replace(" ", "-"))
    run.set_logprobs(column(recomputed, mistake))
    found = judge(run, recomputed)
    assert found.cause == "temperature" and words in found.sentence
    assert found.causes[0].share > 0.9 > 0.5 > found.causes[1].share


def test_a_mistake_is_named_though_rounding_could_explain_a_gap_of_its_size(
    healthy: Examined, recomputed: Recomputed, noise: np.ndarray
):
    run = healthy.run.copy("faint", dtype="bfloat16")
    own_L = column(recomputed, "bfloat16/replay")
    uncapped_L = own_L + (column(recomputed, doctor.SOFTCAP_DROPPED) - column(recomputed, "float32/replay")) / 2
    faint = {**recomputed.readings, doctor.SOFTCAP_DROPPED: memoryview(uncapped_L.astype("<f4").tobytes())}
    faintly = msgspec.structs.replace(recomputed, readings=faint)
    run.set_logprobs(uncapped_L + noise / 3)
    found = judge(run, faintly)
    assert found.gap.mean_abs < found.noise_floor / 2
    assert (found.cause, found.agrees) == ("softcap", False)
    run.set_logprobs(own_L + noise)
    assert judge(run, faintly).agrees, "noise has nothing in common with a mistake"


def test_log_probabilities_are_one_token_off(healthy: Examined, recomputed: Recomputed):
    run = healthy.run.copy("logprobs-late")
    run.set_logprobs(np.roll(column(recomputed, "float32/replay"), 1))
    found = judge(run, recomputed)
    assert found.cause == "tokenisation" and "moved back by one token" in found.sentence


def test_tokens_are_stale(healthy: Examined, recomputed: Recomputed):
    run = healthy.run.copy("stale")
    run.edit(sampled_earlier)
    found = judge(run, recomputed)
    assert found.cause == "staleness" and "were sampled by policy 2, not 3" in found.sentence
    assert any("Stale tokens are expected to differ" in note for note in found.notes)


@pytest.mark.parametrize(("dtype", "times"), [("float32", 1), ("float32", 100), ("bfloat16", 4)])
def test_a_gap_of_unknown_cause_is_not_explained_away(
    healthy: Examined, recomputed: Recomputed, noise: np.ndarray, dtype: str, times: float
):
    run = healthy.run.copy(f"unknown-{dtype}-{times}", dtype=dtype)
    run.set_logprobs(column(recomputed, f"{dtype}/replay") + times * noise)
    found = judge(run, recomputed)
    assert (found.cause, found.agrees) == ("", False)
    assert "no cause that the doctor knows" in found.sentence
