"""Completions of a step's groups, as they lie in the blobs; a step never fails by them."""

from pathlib import Path

import pytest

from beamline.coordinator.samples import SampleFiles, read_samples, samples_path
from beamline.models import tokenizer
from beamline.models.chat import ChatTokenizer
from beamline.protocol import messages as m
from beamline.runtime.memory_blobs import MemoryBlobStore
from group_messages import group_of

TEXTS = ["Answer: 4", "Answer: 5"]


@pytest.fixture
def chat(tmp_path: Path) -> ChatTokenizer:
    tokenizer.write(tmp_path)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {tokenizer.END_OF_TURN_ID}}}')
    return ChatTokenizer.load(tmp_path)


async def scored(blobs: MemoryBlobStore, group_id: str, prompt: list[int]) -> m.ScoredGroup:
    group = await group_of(blobs, TEXTS, group_id=group_id, prompt_tokens=prompt)
    grades = [
        m.Grade(reward=0.5, breakdown={"raw": 1.0, "overlong_penalty": -0.5, "acc": 1.0}, pred="4"),
        m.Grade(reward=None, breakdown={}, why="no verdict within 5 s", abstention="timeout"),
    ]
    fields = {name: getattr(group, name) for name in group.__struct_fields__ if name != "worker"}
    return m.ScoredGroup(**fields, worker="reward-0", grades=grades, score_s=0.1)


async def test_the_first_groups_are_kept_as_people_read_them(tmp_path: Path, chat: ChatTokenizer) -> None:
    blobs = MemoryBlobStore()
    prompt = chat.encode_chat([{"role": "user", "content": "2 + 2 = ?"}])
    groups = [await scored(blobs, f"g{number}", prompt) for number in (3, 1, 2)]
    await SampleFiles(tmp_path / "samples", blobs, chat, num_groups=2).keep(7, groups)
    kept = read_samples(samples_path(tmp_path / "samples", 7))
    assert [group.group_id for group in kept] == ["g1", "g2"]
    first, task = kept[0], groups[1].task
    assert "2 + 2 = ?" in first.prompt and "<|im_start|>" in first.prompt
    assert (first.data_source, first.ground_truth) == (task.data_source, task.ground_truth)
    assert [(one.text, one.reward, one.why, one.pred) for one in first.completions] == [
        ("Answer: 4", 0.5, "", "4"), ("Answer: 5", None, "no verdict within 5 s", ""),
    ]  # fmt: skip
    assert first.completions[0].breakdown == {"raw": 1.0, "overlong_penalty": -0.5, "acc": 1.0}
    assert [one.length for one in first.completions] == groups[1].response_lengths
    assert [one.finish_reason for one in first.completions] == [reason.value for reason in groups[1].finish_reasons]
    assert {one.policy_version for one in first.completions} == {groups[1].max_policy_version}


async def test_none_are_kept_where_none_are_asked_for(tmp_path: Path, chat: ChatTokenizer) -> None:
    blobs = MemoryBlobStore()
    await SampleFiles(tmp_path / "samples", blobs, chat, num_groups=0).keep(1, [await scored(blobs, "g1", [5])])
    assert not (tmp_path / "samples").exists()


async def test_a_lost_blob_is_said_and_nothing_else(
    tmp_path: Path, chat: ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    blobs = MemoryBlobStore()
    group = await scored(blobs, "g1", [5])
    await blobs.release("g1")
    await SampleFiles(tmp_path / "samples", blobs, chat, num_groups=4).keep(1, [group])
    assert "no completions of step 1 are kept: " in caplog.text
    assert "g1" in caplog.text
