"""A fault of each kind is planted where it would arise, and `beamline doctor mismatch` names it in its first sentence.

Engines are vLLM's and sample by `beamline.rollout.sample`; the trainer is Megatron's and reads for every case anew.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from beamline.coordinator.doctor.diagnosis import Diagnosis
from beamline.models import tiny
from doctor_cases import FAULTY_SAMPLER, Examined, FinishedRun, examine, make_checkpoint, one_a_core, roll_tokens

NUM_EXPERTS = tiny.TINY_BEAM.num_experts
PERTURBED = "lm_head.weight"


type Plant = Callable[[FinishedRun], FinishedRun]
type Cases = dict[Plant, Future[Examined]]


def another_weight(healthy: FinishedRun) -> FinishedRun:
    run = healthy.copy("perturbed")
    shutil.rmtree(run.path / "checkpoints")
    make_checkpoint(run.path.parent / "model", run.path / "checkpoints", PERTURBED)
    return run


def no_softcap(healthy: FinishedRun) -> FinishedRun:
    """The engine's config.json names none; its tensors are the trainer's."""
    model = healthy.path.parent / "uncapped-model"
    shutil.copytree(healthy.path.parent / "model", model)
    config = json.loads((model / "config.json").read_text())
    assert config["final_logit_softcapping"] == 30
    (model / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": None}))
    run = healthy.copy("uncapped")
    run.sample_anew(model=str(model))
    return run


def early_temperature(healthy: FinishedRun) -> FinishedRun:
    """In bfloat16, where rounding makes a gap of the same size."""
    run = healthy.copy("folded", dtype="bfloat16")
    run.sample_anew(FAULTY_SAMPLER, dtype="bfloat16")
    return run


def rounding_engine(healthy: FinishedRun) -> FinishedRun:
    """A float32 run whose engine computed in bfloat16."""
    run = healthy.copy("rounding")
    run.sample_anew(dtype="bfloat16")
    return run


def no_replay(rounding: FinishedRun) -> FinishedRun:
    """Engine and trainer in bfloat16 break ties between experts differently, and the run does not replay."""
    return rounding.copy("live", dtype="bfloat16", routing_replay=False)


def wrong_routes(healthy: FinishedRun) -> FinishedRun:
    run = healthy.copy("wrong-routes")
    run.shift_experts(NUM_EXPERTS)
    return run


def late_tokens(healthy: FinishedRun) -> FinishedRun:
    run = healthy.copy("tokens-late")
    run.edit(roll_tokens)
    return run


@pytest.fixture(scope="module")
def cases(healthy: Examined) -> Iterator[Cases]:
    """Each fault planted and examined, one a core: their processes mostly import."""

    def examined(plant: Plant, into: Callable[[], FinishedRun]) -> Examined:
        run = plant(into())
        return Examined(run, examine(run))

    plants = (rounding_engine, no_softcap, early_temperature, another_weight, wrong_routes, late_tokens)
    with one_a_core() as pool:
        cases: Cases = {plant: pool.submit(examined, plant, lambda: healthy.run) for plant in plants}
        cases[no_replay] = pool.submit(examined, no_replay, lambda: cases[rounding_engine].result().run)
        yield cases


def diagnosis_of(case: Future[Examined], cause: str) -> Diagnosis:
    """What the command has found, the cause being named."""
    run, ended = case.result().run, case.result().ended
    assert ended.code == 0, ended.output
    found = run.diagnosis
    assert (found.cause, found.agrees) == (cause, False), found.sentence
    assert ended.shown.splitlines()[0] == found.sentence
    return found


def share(found: Diagnosis, cause: str) -> float:
    return next(c.share for c in found.causes if c.name == cause)


def gap(found: Diagnosis, reading: str) -> float:
    return next(r.gap.mean_abs for r in found.readings if r.name == reading)


def test_nothing_is_wrong(healthy: Examined):
    found, lines = healthy.run.diagnosis, healthy.ended.shown.splitlines()
    assert found.agrees and found.cause == "" and found.gap.mean_abs < 1e-5
    assert lines[0] == found.sentence and found.sentence.startswith("The engine and the trainer agree: ")
    assert lines[-1].split() == ["page", str(healthy.run.samples / "mismatch.html")]
    assert (found.sampled_version, found.checkpoint_version, found.routing) == (3, 3, "replay")
    assert found.num_trajectories == 24 and found.num_tokens > 500
    assert [layer.layer for layer in found.layers] == [1, 2, 3]
    assert min(layer.agreement for layer in found.layers) > 0.99
    assert sum(position.num_tokens for position in found.positions) == found.num_tokens
    assert gap(found, "bfloat16/replay") > 100 * gap(found, "float32/replay")
    assert next(c for c in found.causes if c.name == "weights").evidence.startswith(
        "all 204 tensors have the checksums"
    )


def test_a_weight_differs(cases: Cases):
    found = diagnosis_of(cases[another_weight], "weights")
    assert f"1 of 204 tensors differ from what the engine verified: {PERTURBED}" in found.sentence
    assert share(found, "weights") > 0.5


def test_the_engine_drops_the_softcap(cases: Cases):
    found = diagnosis_of(cases[no_softcap], "softcap")
    assert "the largest cause is the softcap, 100% of it: without the softcap of 30 the gap is" in found.sentence
    assert gap(found, "softcap dropped") < 1e-5 < 1e-2 < found.gap.mean_abs


def test_the_engine_applies_the_temperature_before_the_softcap(cases: Cases):
    found = diagnosis_of(cases[early_temperature], "temperature")
    assert "is the temperature, " in found.sentence
    assert "with temperature 0.7 applied before the softcap the gap is" in found.sentence
    assert found.gap.mean_abs < 1.5 * found.noise_floor
    assert 0.35 < share(found, "temperature") < 0.65


def test_the_engine_rounds_though_the_run_is_in_float32(cases: Cases):
    found = diagnosis_of(cases[rounding_engine], "precision")
    assert "the largest cause is the precision (the engine rounds as bfloat16 does), 100% of it" in found.sentence
    assert gap(found, "float32/live") > 2 * gap(found, "float32/replay"), "routes are replayed"


def test_routes_are_ignored(cases: Cases):
    found = diagnosis_of(cases[no_replay], "routing")
    assert "is the routing (the engine's experts are not replayed), " in found.sentence
    assert found.gap.mean_abs == gap(found, "bfloat16/live") > 2 * gap(found, "bfloat16/replay")
    assert all(0.9 < layer.agreement < 1 for layer in found.layers)


def test_routes_are_not_those_that_the_engine_took(cases: Cases):
    found = diagnosis_of(cases[wrong_routes], "routing")
    assert "the replayed experts are not those that the engine computed with" in found.sentence
    assert share(found, "routing") > 0.99
    assert max(layer.agreement for layer in found.layers) < 0.1


def test_tokens_are_one_place_off(cases: Cases):
    found, run = diagnosis_of(cases[late_tokens], "tokenisation"), cases[late_tokens].result().run
    assert "every response token moved back by one" in found.sentence
    assert share(found, "tokenisation") > 0.99
    assert any("trajectories have tokens that do not decode to the text" in note for note in found.notes)
    assert 'data-chart="causes"' in (run.samples / "mismatch.html").read_text()


def test_the_page_holds_everything_and_asks_for_nothing(healthy: Examined):
    page = (healthy.run.samples / "mismatch.html").read_text()
    assert healthy.run.diagnosis.sentence in page
    for key in ("readings", "scatter", "positions", "layers"):
        assert f'data-chart="{key}"' in page
    assert 'data-chart="causes"' not in page, "there is no gap to share out"
    own, _, libraries = page.partition('<script type="application/json"')
    assert "default-src 'none'" in own and "http" not in own.replace("http-equiv", "")
    assert len(libraries) > 100_000, "the chart library is in the page"
