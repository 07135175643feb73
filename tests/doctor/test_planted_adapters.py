"""A run that trained adapters, whose engine gave those of experts the scale of all others: the doctor says so.

The engine is vLLM's, the trainer Megatron's. Other faults are planted in what the two have said.
"""

import os
import shutil
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from adapter_checkpoints import adapters_with, write
from beamline.coordinator.doctor.case import Options, case_of_run
from beamline.coordinator.doctor.diagnosis import Diagnosis
from beamline.coordinator.doctor.sides import Sides
from beamline.models import tiny
from beamline.protocol import doctor
from beamline.protocol.doctor import Recomputed
from doctor_cases import LORA, Examined, FinishedRun, adapted_run, examine, judge
from made_adapters import made

OPTIONS = Options(problems=6, samples=4)
OWN = "float32/replay"
ADAPTERS = adapters_with("tiny-beam", LORA)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Examined:
    folder = tmp_path_factory.mktemp("adapted")
    tiny.build(tiny.TINY_BEAM, folder / "model", seed=7, randomise=True)
    run = adapted_run(folder / "model", folder / "adapted")
    write(folder / "weak", ADAPTERS, folder / "model", weak_experts())
    case = replace(case_of_run(run.path, OPTIONS), adapters=folder / "weak")
    Sides(os.environ, threads=len(os.sched_getaffinity(0))).sample(case, OPTIONS)
    return Examined(run, examine(run))


def weak_experts() -> dict[str, np.ndarray]:
    """The run's adapters, but what those of experts add has been divided by the experts a token."""
    names = {adapter.b for adapter in ADAPTERS if adapter.is_expert}
    found = made(ADAPTERS)
    return {n: t / tiny.TINY_BEAM.num_experts_per_tok if n in names else t for n, t in found.items()}


@pytest.fixture(scope="module")
def recomputed(adapted: Examined) -> Recomputed:
    return adapted.run.readings


def column(recomputed: Recomputed, name: str) -> np.ndarray:
    return np.frombuffer(recomputed.readings[name], "<f4").astype(np.float64)


def as_if(adapted: Examined, recomputed: Recomputed, reading: str) -> Diagnosis:
    """What is found where the engine said what the trainer reads so, of weights that it had verified."""
    run = adapted.run.copy(reading.replace(" ", "-").replace("/", "-"))
    run.set_logprobs(column(recomputed, reading))
    return judge(run, msgspec.structs.replace(recomputed, differing_weights=[]))


def share(found: Diagnosis, cause: str) -> float:
    return next(c.share for c in found.causes if c.name == cause)


def test_an_engine_that_scales_experts_adapters_like_the_others(adapted: Examined):
    found, ended = adapted.run.diagnosis, adapted.ended
    assert ended.code == 0, ended.output
    assert (found.cause, found.agrees) == ("adapters", False), found.sentence
    assert "is the adapters, 100% of it: with the experts' adapters scaled by alpha / rank" in found.sentence
    assert found.gap.mean_abs > 0.1
    scaled = next(r.gap.mean_abs for r in found.readings if r.name == doctor.EXPERTS_SCALED_BY_RANK)
    assert scaled < 1e-5, "and nothing else is wrong"
    names = [adapter.b for adapter in ADAPTERS if adapter.is_expert]
    assert sorted(adapted.run.readings.differing_weights) == sorted(names)


def test_an_engine_without_the_adapters(adapted: Examined, recomputed: Recomputed):
    found = as_if(adapted, recomputed, doctor.ADAPTERS_LEFT_OUT)
    assert (found.cause, found.agrees) == ("adapters", False), found.sentence
    assert "without the adapters the gap is" in found.sentence
    assert share(found, "adapters") > 0.99 > 0.9 > share(found, "routing")


def test_nothing_is_wrong(adapted: Examined, recomputed: Recomputed):
    found = as_if(adapted, recomputed, OWN)
    assert found.agrees and found.cause == "", found.sentence


def test_readings_of_both_precisions_have_the_adapters(recomputed: Recomputed):
    left_out = np.abs(column(recomputed, doctor.ADAPTERS_LEFT_OUT) - column(recomputed, OWN)).mean()
    rounding = np.abs(column(recomputed, "bfloat16/replay") - column(recomputed, OWN)).mean()
    assert 0 < rounding < left_out / 2


def test_a_run_without_its_adapters_is_refused(adapted: Examined):
    run: FinishedRun = adapted.run.copy("lost")
    shutil.rmtree(run.path / "checkpoints" / "global_step_3" / "adapter")
    ended = examine(run)
    assert ended.code == 2 and "which is no checkpoint" in ended.output, ended.output
