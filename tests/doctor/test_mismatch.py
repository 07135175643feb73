"""The doctor names what is wrong: a fault of each kind, planted in what a run kept, and none in a healthy run.

The engine samples once. Where only its log-probabilities are spoilt, the trainer's readings of the healthy run serve;
where tokens, routes or weights are, the trainer reads again.
"""

import os
import re
import shutil

import msgspec
import numpy as np
import pytest

from beamline.coordinator.doctor.case import Options, case_of_run
from beamline.coordinator.doctor.diagnose import diagnose
from beamline.coordinator.doctor.diagnosis import Diagnosis
from beamline.coordinator.doctor.engine_tokens import read_engine_tokens
from beamline.coordinator.doctor.mismatch import evidence_of
from beamline.coordinator.doctor.sides import Sides
from beamline.models import tiny
from beamline.models.chat import ChatTokenizer
from beamline.protocol import doctor
from beamline.protocol.doctor import Recomputed
from beamline.runtime.sample_files import read_index, read_recomputed
from doctor_cases import Examined, FinishedRun, examine, make_checkpoint, roll_tokens, sampled_earlier

NUM_EXPERTS = tiny.TINY_BEAM.num_experts
PERTURBED = "lm_head.weight"


def told(run: FinishedRun) -> Diagnosis:
    return msgspec.json.decode((run.samples / "mismatch.json").read_bytes(), type=Diagnosis)


def readings_of(run: FinishedRun) -> Recomputed:
    return read_recomputed(run.samples / "readings.bin")


def column(recomputed: Recomputed, name: str) -> np.ndarray:
    return np.frombuffer(recomputed.readings[name], "<f4").astype(np.float64)


def judge(run: FinishedRun, recomputed: Recomputed) -> Diagnosis:
    """The diagnosis from readings that are there already."""
    case, samples = case_of_run(run.path, Options()), read_index(run.samples)
    engine = read_engine_tokens(run.samples, samples, ChatTokenizer.load(case.engine_model).decode)
    return diagnose(run.path.name, evidence_of(case, samples, engine, recomputed), samples, recomputed)


@pytest.fixture(scope="module")
def recomputed(healthy: Examined) -> Recomputed:
    return readings_of(healthy.run)


@pytest.fixture(scope="module")
def rerouted(healthy: Examined) -> tuple[FinishedRun, Recomputed]:
    """A run without replay whose routes are others than the trainer's, and the trainer's readings of it."""
    run = healthy.run.copy("rerouted", routing_replay=False)
    run.shift_experts(NUM_EXPERTS)
    found = Sides(os.environ, threads=1).recompute(case_of_run(run.path, Options()))
    return run, found


def test_a_healthy_run_agrees(healthy: Examined):
    found, lines = told(healthy.run), healthy.ended.shown.splitlines()
    assert found.agrees and found.cause == "" and found.gap.mean_abs < 1e-5
    assert found.sentence in lines and found.sentence.startswith("The engine and the trainer agree: ")
    assert lines[-1].split() == ["page", str(healthy.run.samples / "mismatch.html")]
    assert (found.sampled_version, found.checkpoint_version, found.routing) == (3, 3, "replay")
    assert found.num_trajectories == 24 and found.num_tokens > 500
    assert [layer.layer for layer in found.layers] == [1, 2, 3]
    assert min(layer.agreement for layer in found.layers) > 0.99
    assert sum(position.num_tokens for position in found.positions) == found.num_tokens
    by_name = {reading.name: reading.gap.mean_abs for reading in found.readings}
    assert by_name["bfloat16/replay"] > 100 * by_name["float32/replay"]
    assert next(c for c in found.causes if c.name == "weights").evidence.startswith(
        "all 204 tensors have the checksums"
    )


def test_the_page_holds_everything_and_asks_for_nothing(healthy: Examined):
    page = (healthy.run.samples / "mismatch.html").read_text()
    assert told(healthy.run).sentence in page
    for key in ("readings", "scatter", "positions", "layers"):
        assert f'data-chart="{key}"' in page
    assert 'data-chart="causes"' not in page, "there is no gap to share out"
    own, _, libraries = page.partition('<script type="application/json"')
    assert "default-src 'none'" in own and "http" not in own.replace("http-equiv", "")
    assert len(libraries) > 100_000, "the chart library is in the page"


@pytest.mark.parametrize(
    ("fault", "cause", "words"),
    [
        (doctor.SOFTCAP_DROPPED, "softcap", "without the softcap of 30"),
        (doctor.TEMPERATURE_BEFORE_SOFTCAP, "temperature", "temperature 0.7 applied before the softcap"),
        (doctor.TEMPERATURE_IGNORED, "temperature", "temperature 1 in the place of 0.7"),
        ("bfloat16/replay", "precision", "bfloat16"),
    ],
)
def test_an_engine_that_computes_otherwise_is_found_out(
    healthy: Examined, recomputed: Recomputed, fault: str, cause: str, words: str
):
    run = healthy.run.copy(re.sub(r"\W", "-", fault))
    run.set_logprobs(column(recomputed, fault))
    found = judge(run, recomputed)
    assert (found.cause, found.agrees) == (cause, False)
    assert words in found.sentence
    assert found.causes[0].share > 0.9 > 0.5 > found.causes[1].share


def test_log_probabilities_one_token_off_are_found_out(healthy: Examined, recomputed: Recomputed):
    run = healthy.run.copy("logprobs-late")
    run.set_logprobs(np.roll(column(recomputed, "float32/replay"), 1))
    found = judge(run, recomputed)
    assert found.cause == "tokenisation" and "moved back by one token" in found.sentence


def test_tokens_one_place_off_are_found_out(healthy: Examined):
    run = healthy.run.copy("tokens-late")
    run.edit(roll_tokens)
    ended = examine(run)
    assert ended.code == 0, ended.output
    found = told(run)
    assert found.cause == "tokenisation" and "every response token moved back by one" in found.sentence
    assert found.causes[0].share > 0.99
    assert any("trajectories have tokens that do not decode to the text" in note for note in found.notes)
    assert 'data-chart="causes"' in (run.samples / "mismatch.html").read_text()


def test_a_weight_that_differs_is_found_out_by_name(healthy: Examined):
    run = healthy.run.copy("perturbed")
    shutil.rmtree(run.path / "checkpoints")
    make_checkpoint(run.path.parent / "model", run.path / "checkpoints", PERTURBED)
    ended = examine(run)
    assert ended.code == 0, ended.output
    found = told(run)
    assert found.cause == "weights"
    assert f"1 of 204 tensors differ from what the engine verified: {PERTURBED}" in found.sentence
    assert found.causes[0].share > 0.5


def test_routes_that_are_not_replayed_are_found_out(rerouted: tuple[FinishedRun, Recomputed]):
    run, recomputed = rerouted
    run.set_logprobs(column(recomputed, "float32/replay"))
    found = judge(run, recomputed)
    assert found.cause == "routing" and "the engine's experts are not replayed" in found.sentence
    assert found.causes[0].share > 0.99
    assert max(layer.agreement for layer in found.layers) < 0.5


def test_routes_that_the_engine_did_not_use_are_found_out(
    healthy: Examined, rerouted: tuple[FinishedRun, Recomputed], recomputed: Recomputed
):
    run = healthy.run.copy("wrong-routes")
    run.set_logprobs(column(recomputed, "float32/live"))
    found = judge(run, rerouted[1])
    assert found.cause == "routing" and "not those that the engine computed with" in found.sentence


def test_stale_tokens_are_found_out(healthy: Examined, recomputed: Recomputed):
    run = healthy.run.copy("stale")
    run.edit(sampled_earlier)
    found = judge(run, recomputed)
    assert found.cause == "staleness" and "were sampled by policy 2, not 3" in found.sentence
    assert any("Stale tokens are expected to differ" in note for note in found.notes)


def test_a_gap_of_unknown_cause_is_not_explained_away(healthy: Examined, recomputed: Recomputed):
    run = healthy.run.copy("unknown")
    noise = np.random.default_rng(0).normal(0, 2, len(column(recomputed, "float32/replay")))
    run.set_logprobs(column(recomputed, "float32/replay") - np.abs(noise))
    found = judge(run, recomputed)
    assert (found.cause, found.agrees) == ("", False)
    assert "no cause that the doctor knows" in found.sentence
