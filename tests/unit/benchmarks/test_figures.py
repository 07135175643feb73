"""The arithmetic of `make bench`; nothing is timed here."""

from pathlib import Path

import msgspec
import pytest
from benchmarks.bench import make_summary
from benchmarks.figures import Ring, Side, Step, compare, measured_steps, rows
from benchmarks.r3 import added_share
from benchmarks.sides import first_groups

from beamline.protocol.config import DataSection, ModelSection, RolloutSection, RunConfig, SamplingSection


def metrics(seconds: float, **changes: float) -> dict[str, float]:
    values = {
        "timing/step": seconds,
        "timing/generate": 0.5 * seconds,
        "timing/sync": 0.03 * seconds,
        "timing/generate_engine": 0.46 * seconds,
        "timing/train_old_logprobs": 0.1 * seconds,
        "timing/train_update": 0.4 * seconds,
        "tokens/prompt": 1_000.0,
        "tokens/response": 3_000.0,
        "resources/rss_bytes/trainer": 100.0 * seconds,
    }
    return values | {name.replace("__", "/"): value for name, value in changes.items()}


def side(seconds: float, response_tokens: int = 3_000) -> Side:
    return Side(steps=[Step(seconds=seconds, prompt_tokens=1_000, response_tokens=response_tokens)])


def test_the_figures_are_those_of_the_median_step_after_the_warm_up():
    ring = measured_steps({1: metrics(90.0), 2: metrics(4.0), 3: metrics(2.0), 4: metrics(3.0)}, num_warm_up=1)
    figures = compare(ring, trl=side(6.0), vllm=side(1.2))
    assert figures.step_vs_trl == pytest.approx((4_000 / 3) / (4_000 / 6))
    assert figures.generate_vs_vllm == pytest.approx((3_000 / 1.5) / (3_000 / 1.2))
    assert figures.overhead_share == pytest.approx(0.04)
    assert figures.sync_ms == pytest.approx(90.0)
    assert figures.missed() == ["generate_vs_vllm"]


def test_time_that_no_engine_computed_is_overhead_whichever_phase_it_lies_in():
    spent_in_train = metrics(10.0, timing__train=9.0, timing__train_update=2.0)
    assert measured_steps({1: spent_in_train}, 0).overhead_share == pytest.approx(1 - 0.46 - 0.1 - 0.2)


def test_sides_with_unlike_lengths_are_compared_by_tokens_per_second():
    ring = measured_steps({1: metrics(3.0)}, 0)
    assert compare(ring, side(3.0, response_tokens=7_000), side(1.5)).step_vs_trl == pytest.approx(0.5)


def test_a_slow_round_does_not_decide():
    rounds = [measured_steps({1: metrics(seconds)}, 0) for seconds in (3.0, 9.0, 2.0)]
    trl = Side.join(side(seconds) for seconds in (6.0, 6.0, 60.0))
    assert compare(Ring.join(rounds), trl, side(1.5)).step_vs_trl == pytest.approx(2.0)


def test_what_replay_costs_is_the_median_of_like_steps_after_the_warm_up():
    replayed, plain = [[9.0, 4.0, 2.0], [9.0, 5.0, 8.0]], [[1.0, 3.0, 1.9], [1.0, 4.8, 6.0]]
    assert added_share(replayed, plain) == pytest.approx((0.05 + 0.25) / 2)


def test_memory_is_the_largest_that_a_worker_told():
    ring = measured_steps({1: metrics(2.0), 2: metrics(5.0), 3: metrics(3.0)}, 0)
    assert ring.memory() == {"trainer": 500.0}


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        ({1: metrics(1.0)}, "leave nothing to measure"),
        ({1: {}, 2: {"timing/step": 1.0}}, "have no timing/generate"),
    ],
)
def test_too_little_to_measure_is_refused(steps: dict[int, dict[str, float]], complaint: str):
    with pytest.raises(ValueError, match=complaint):
        measured_steps(steps, num_warm_up=1)


def test_a_side_without_steps_is_refused_where_it_is_read():
    with pytest.raises(msgspec.ValidationError, match="measure more steps"):
        msgspec.json.decode(b'{"steps": []}', type=Side)


def test_summary_and_table_hold_the_figures_and_what_they_come_from():
    ring, trl, vllm = measured_steps({1: metrics(3.0)}, 0), side(6.0), side(1.2)
    figures = compare(ring, trl, vllm)
    summary = msgspec.json.decode(msgspec.json.encode(make_summary(figures, ring, trl, vllm)))
    assert {"step_vs_trl", "generate_vs_vllm", "overhead_share", "sync_ms", "raw"} <= summary.keys()
    raw = summary["raw"]
    assert summary["step_vs_trl"] == pytest.approx(
        raw["beamline"]["step"]["tokens_per_s"] / raw["trl"]["step"]["tokens_per_s"]
    )
    table = {name: figure for name, figure, _ in rows(figures, ring, trl, vllm)}
    assert table["step_vs_trl"] == "2.00 x"
    assert table["overhead_share"] == "4.0%"


def test_bare_vllm_gets_the_prompts_and_seeds_that_the_ring_issues(tmp_path: Path):
    from beamline.coordinator.seeds import sample_seed
    from beamline.models import assets, chained_sums
    from beamline.models.chat import ChatTokenizer
    from beamline.models.datasets import PromptRow, write_rows

    model = assets.materialise("bench", tmp_path / "model")
    texts = [problem.prompt for problem in chained_sums.train_problems()[:3]]
    row = [
        PromptRow(data_source="sums", messages=({"role": "user", "content": text},), ground_truth="0", index=i)
        for i, text in enumerate(texts)
    ]
    config = RunConfig(
        model=ModelSection(path=str(model)),
        data=DataSection(train=str(write_rows(tmp_path / "train.parquet", row)), shuffle=False),
        rollout=RolloutSection(sampling=SamplingSection(groups_per_step=2, samples_per_group=2)),
    )
    steps = first_groups(config, num_steps=2)
    assert [len(groups) for groups in steps] == [2, 2]
    chat = ChatTokenizer.load(model)
    expected = chat.encode_chat([{"role": "user", "content": texts[2]}], reasoning_effort="minimal")
    assert steps[1][0]["prompt_tokens"] == expected
    assert steps[1][0]["seeds"] == [sample_seed(0, "g-000002", sample) for sample in range(2)]
