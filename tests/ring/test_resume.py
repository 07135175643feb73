"""A run of 12 steps, and one that is killed and goes on after 6: the same groups, batches and counts."""

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from beamline.coordinator.journal import Issued, Resumed, decode_record
from beamline.coordinator.metrics_file import read_metrics
from beamline.coordinator.resume_files import CURSOR_FILE, LEDGER_FILE, DataCursorFile, LedgerFile
from beamline.coordinator.summary import read_summary
from beamline.protocol import messages as m
from beamline.protocol.config import Placement, RunConfig
from beamline.protocol.errors import ConfigError
from ring_run import Ring, configure
from scripted_services import Mishaps

NUM_STEPS, SAVED_STEP = 12, 6
DYNAMIC = {"dynamic_sampling": {"mode": "filter", "max_sample_batches": 3}}


class LostRing(Ring):
    """All of it dies at a random moment, some steps after its checkpoint is complete."""

    async def until_done(self) -> None:
        coordinator = asyncio.create_task(self.coordinate())
        await asyncio.sleep(0)
        saves = self.core.state.saves
        await self.core.pulse.until(lambda: saves.checkpoint is not None and self.core.ledger.step > SAVED_STEP)
        for _ in range(self.rng.randint(0, 800)):
            await asyncio.sleep(0)
        coordinator.cancel()
        await asyncio.gather(coordinator, return_exceptions=True)


def config_of(
    seed: int, *, max_staleness: int = 0, algorithm: dict[str, Any] | None = None, **trainer: Any
) -> RunConfig:
    """Placement by the seed."""
    config = configure(random.Random(seed), algorithm or {})
    settings = {"num_steps": NUM_STEPS, "eval_interval": 3, "checkpoint_interval": SAVED_STEP, "export_interval": 0}
    placement = Placement.DISAGGREGATED if max_staleness else config.run.placement
    return msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, placement=placement),
        coordinator=msgspec.structs.replace(config.coordinator, max_staleness=max_staleness),
        trainer=msgspec.structs.replace(config.trainer, **{**settings, **trainer}),
    )


def put_checkpoint(ring: Ring, folder: Path) -> Path:
    """The coordinator's files of the checkpoint that a scripted trainer has taken."""
    folder.mkdir(parents=True)
    for name, content in ring.witness.files[SAVED_STEP].items():
        (folder / name).write_bytes(content)
    return folder


def resuming(config: RunConfig, checkpoint: Path) -> RunConfig:
    trainer = msgspec.structs.replace(config.trainer, resume_mode="from_path", resume_path=str(checkpoint))
    return msgspec.structs.replace(config, trainer=trainer)


def go_on(seed: int, run_dir: Path, config: RunConfig, checkpoint: Path, mishaps: Mishaps, num_kills: int = 0) -> Ring:
    """A new broker, new services, the same folder."""
    ring = Ring(
        seed + 1000,
        run_dir,
        config=resuming(config, checkpoint),
        mishaps=mishaps,
        num_kills=num_kills,
        first_version=SAVED_STEP,
    )
    asyncio.run(ring.run())
    return ring


def lost(seed: int, run_dir: Path, config: RunConfig, mishaps: Mishaps) -> tuple[Ring, Path]:
    ring = LostRing(seed, run_dir, config=config, mishaps=mishaps)
    asyncio.run(ring.run())
    return ring, put_checkpoint(ring, run_dir / "checkpoints" / f"global_step_{SAVED_STEP}")


def issued(ring: Ring) -> dict[str, m.PromptGroup]:
    """First attempts by group, of the journal."""
    records = [decode_record(payload) for payload in ring.hub.journal]
    return {r.prompt.group_id: r.prompt for r in records if isinstance(r, Issued) and r.prompt.attempt == 0}


def what_is_sampled(prompts: Mapping[str, m.PromptGroup]) -> dict[str, object]:
    return {name: (p.task, p.prompt_tokens, p.sampling, p.seeds) for name, p in prompts.items()}


@pytest.mark.parametrize("algorithm", [{}, DYNAMIC], ids=["plain", "dynamic"])
@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_goes_on_is_the_run_that_never_stopped(seed: int, algorithm: dict[str, Any], tmp_path: Path) -> None:
    config, mishaps = config_of(seed, algorithm=algorithm), Mishaps(useless=0.3)
    whole = Ring(seed, tmp_path / "whole", config=config, mishaps=mishaps, num_kills=0)
    asyncio.run(whole.run())
    first, checkpoint = lost(seed, tmp_path / "parts", config, mishaps)
    second = go_on(seed, tmp_path / "parts", config, checkpoint, mishaps)

    assert second.witness.trained_steps == list(range(SAVED_STEP + 1, NUM_STEPS + 1))
    before = {step: ids for step, ids in first.witness.batches.items() if step <= SAVED_STEP}
    assert before | second.witness.batches == whole.witness.batches
    # What was issued after the checkpoint was issued again, under the same ids.
    assert what_is_sampled(issued(first) | issued(second)) == what_is_sampled(issued(whole))
    assert second.core.ledger.counts() == whole.core.ledger.counts()
    assert second.core.state.position == whole.core.state.position
    check_folder(tmp_path / "whole", tmp_path / "parts")


def check_folder(whole: Path, parts: Path) -> None:
    """The summary covers both parts, and nothing is told twice; what was lost is beside it."""
    one, other = read_summary(whole / "summary.json"), read_summary(parts / "summary.json")
    assert other.ledger == one.ledger and other.status == "finished"
    assert [step.step for step in other.steps if "reward/mean" in step.values] == list(range(1, NUM_STEPS + 1))
    assert [(e.step, e.name) for e in other.evaluations] == [(e.step, e.name) for e in one.evaluations]
    same = ("reward/mean", "sampling/filtered_groups", "data/position", "ledger/issued", "ledger/trained")
    assert [{name: s.values[name] for name in same} for s in other.steps if s.step] == [
        {name: s.values[name] for name in same} for s in one.steps if s.step
    ]
    lines = [line.step for line in read_metrics(parts / "metrics.jsonl") if "timing/step" in line.values]
    assert lines == list(range(1, NUM_STEPS + 1))
    aside = read_metrics(parts / "superseded" / "1" / "metrics.jsonl")
    assert aside and min(line.step for line in aside) > SAVED_STEP
    assert (parts / "evals" / f"global_step_{SAVED_STEP}").is_dir()


@pytest.mark.parametrize("seed", range(12))
def test_a_run_that_goes_on_keeps_its_promises(seed: int, tmp_path: Path) -> None:
    """Whatever goes wrong in both parts, with groups in flight at the checkpoint, and coordinators killed."""
    config = config_of(seed, max_staleness=seed % 3)
    mishaps = Mishaps(failed=0.1, unmendable=0.2, useless=0.2, abstained=0.05, spoiled=0.1, unready=0.1)
    first, checkpoint = lost(seed, tmp_path, config, mishaps)
    ledger = msgspec.json.decode((checkpoint / LEDGER_FILE).read_bytes(), type=LedgerFile)
    second = go_on(seed, tmp_path, config, checkpoint, mishaps, num_kills=6)

    counts = second.core.ledger.counts()
    assert counts["issued"] == sum(counts[end] for end in ("trained", "filtered", "stale", "failed"))
    assert second.witness.trained_steps == list(range(SAVED_STEP + 1, NUM_STEPS + 1))
    assert min(second.witness.staleness) >= 0 and max(second.witness.staleness) <= seed % 3
    kept = {name for step, ids in first.witness.batches.items() if step <= SAVED_STEP for name in ids}
    assert not kept & {name for ids in second.witness.batches.values() for name in ids}, "a group was trained twice"
    assert counts["trained"] == ledger.ends.trained + len(second.witness.trained_groups)
    again = resumed(second).prompts
    assert [
        msgspec.structs.replace(
            new, min_policy_version=old.min_policy_version, deadline=old.deadline, traceparent=old.traceparent
        )
        for new, old in zip(again, ledger.open, strict=True)
    ] == ledger.open
    assert {prompt.min_policy_version for prompt in again} <= {SAVED_STEP}
    num_before = sum(msgspec.structs.astuple(ledger.ends)) + len(ledger.open)
    assert sorted(issued(second)) == [f"g-{n:06d}" for n in range(num_before, counts["issued"])]
    assert second.core.state.num_dropped == second.core.state.position - counts["issued"]


def resumed(ring: Ring) -> Resumed:
    records = [decode_record(payload) for payload in ring.hub.journal]
    (record,) = [record for record in records if isinstance(record, Resumed)]
    return record


def test_groups_in_flight_are_in_the_checkpoint(tmp_path: Path) -> None:
    """Else the promises above were kept for nothing."""
    num_open = 0
    for seed in range(3):
        _, checkpoint = lost(seed, tmp_path / str(seed), config_of(seed, max_staleness=2), Mishaps())
        num_open += len(msgspec.json.decode((checkpoint / LEDGER_FILE).read_bytes(), type=LedgerFile).open)
    assert num_open > 0


def test_an_extended_run_replaces_its_summary(tmp_path: Path) -> None:
    config = config_of(0, num_steps=SAVED_STEP)
    ring = Ring(0, tmp_path, config=config, mishaps=Mishaps(), num_kills=0)
    asyncio.run(ring.run())
    before = read_summary(tmp_path / "summary.json")
    checkpoint = put_checkpoint(ring, tmp_path / "checkpoints" / f"global_step_{SAVED_STEP}")
    second = go_on(0, tmp_path, config_of(0, num_steps=NUM_STEPS), checkpoint, Mishaps())
    after = read_summary(tmp_path / "summary.json")
    assert [step.step for step in after.steps if "reward/mean" in step.values] == list(range(1, NUM_STEPS + 1))
    assert after.started == before.started and after.duration_s > before.duration_s
    assert read_summary(tmp_path / "superseded" / "1" / "summary.json") == before
    assert 6 in resumed(second).evaluated, "its evaluation was done, and is not repeated"


@pytest.mark.parametrize("name", [CURSOR_FILE, LEDGER_FILE])
@pytest.mark.parametrize("damage", ["missing", "cut", "foreign", "version", "negative"])
def test_a_damaged_file_is_refused_by_name_and_nothing_is_changed(name: str, damage: str, tmp_path: Path) -> None:
    config = config_of(0)
    _, checkpoint = lost(0, tmp_path, config, Mishaps())
    path = checkpoint / name
    content = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "foreign":
            path.write_bytes(b'{"colour": "red"}')
        case "version":
            path.write_bytes(content.replace(b"/1", b"/9", 1))
        case _:
            path.write_bytes(
                content.replace(b'"position": ', b'"position": -').replace(b'"trained": ', b'"trained": -')
            )
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=rf"{name} cannot be read .*: resume from another checkpoint"):
        go_on(0, tmp_path, config, checkpoint, Mishaps())
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics and not (tmp_path / "superseded").exists()


def test_files_of_two_checkpoints_are_refused(tmp_path: Path) -> None:
    _, checkpoint = lost(0, tmp_path, config_of(0), Mishaps())
    cursor = msgspec.json.decode((checkpoint / CURSOR_FILE).read_bytes(), type=DataCursorFile)
    (checkpoint / CURSOR_FILE).write_bytes(msgspec.json.encode(msgspec.structs.replace(cursor, position=3)))
    with pytest.raises(ConfigError, match=r"ledger\.json has \d+ groups, data_cursor\.json only 3 rows"):
        go_on(0, tmp_path, config_of(0), checkpoint, Mishaps())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"rows_hash": "0" * 32},
            r"data\.train=prompts has 10 rows of hash \w{32}, and .* trained on 10 rows of hash 0+",
        ),
        ({"num_rows": 7}, r"10 rows of hash .* 7 rows of hash .*go on with those, or begin a new run on the new ones"),
        ({"seed": 3}, r"data\.shuffle=true and run\.seed=3, and this run .*run\.seed=0: go on with that"),
        ({"seed": None}, r"trained with data\.shuffle=false, and this run draws its prompts with data\.shuffle=true"),
    ],
)
def test_other_data_are_refused_with_both_identities(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    _, checkpoint = lost(0, tmp_path, config_of(0), Mishaps())
    cursor = msgspec.json.decode((checkpoint / CURSOR_FILE).read_bytes(), type=DataCursorFile)
    changed = msgspec.structs.replace(cursor, rows=msgspec.structs.replace(cursor.rows, **change))
    (checkpoint / CURSOR_FILE).write_bytes(msgspec.json.encode(changed))
    with pytest.raises(ConfigError, match=text):
        go_on(0, tmp_path, config_of(0), checkpoint, Mishaps())


def test_a_journal_of_an_earlier_launch_is_refused(tmp_path: Path) -> None:
    ring, checkpoint = lost(0, tmp_path, config_of(0), Mishaps())
    ring.config = resuming(ring.config, checkpoint)
    with pytest.raises(ConfigError, match=r"did not go on from .*global_step_6: remove the run's streams"):
        asyncio.run(ring.coordinate())
