"""Reading the traces of a run: as they grow, with damage, and where there are none."""

import logging
import shutil
from pathlib import Path

import pytest

from beamline.coordinator.observe.spans import SpanFiles, read_spans
from beamline.protocol.errors import ConfigError
from example_spans import write_example_traces


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_example_traces(tmp_path)
    return tmp_path


def test_every_span_is_read_with_its_worker(run_dir: Path):
    spans = {(span.name, span.worker, span.start_ns) for span in read_spans(run_dir)}
    assert {worker for _, worker, _ in spans} == {"coordinator", "rollout-0", "reward", "trainer"}
    assert ("generate", "coordinator", 2_000_000_000) in spans
    assert ("assemble", "trainer", 2_510_000_000) in spans


def test_a_tree_and_its_links(run_dir: Path):
    spans = list(read_spans(run_dir))
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        assert span.parent_id == "" or by_id[span.parent_id].trace_id == span.trace_id, span
    (assemble,) = (span for span in spans if span.name == "assemble" and span.start_ns > 2_000_000_000)
    assert [link.attributes["beamline.group_id"] for link in assemble.links] == ["g-000002", "g-000003"]
    assert assemble.links[1].trace_id == by_id[assemble.links[1].span_id].trace_id != assemble.trace_id


def test_a_line_that_was_cut_short_is_left_out_and_said(run_dir: Path, caplog: pytest.LogCaptureFixture):
    whole = list(read_spans(run_dir))
    path = run_dir / "traces" / "reward.jsonl"
    path.write_bytes(path.read_bytes() + b'{"resourceSpans":[{"scope\n' + b'{"resourceSpans":[{')
    with caplog.at_level(logging.WARNING):
        assert list(read_spans(run_dir)) == whole
    assert "reward.jsonl: 1 damaged lines are left out" in caplog.text
    assert "the last 19 bytes are no whole line" in caplog.text


def test_a_folder_that_is_half_gone(run_dir: Path):
    (run_dir / "traces" / "coordinator.jsonl").unlink()
    assert {span.worker for span in read_spans(run_dir)} == {"rollout-0", "reward", "trainer"}
    shutil.rmtree(run_dir / "traces")
    with pytest.raises(ConfigError, match=r"no folder `traces`.*telemetry\.traces"):
        list(read_spans(run_dir))


def test_files_are_followed_as_they_grow(run_dir: Path):
    path = run_dir / "traces" / "trainer.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:30])
    files = SpanFiles(run_dir)
    first = [span for span in files.new() if span.worker == "trainer"]
    assert list(files.new()) == [] and files.num_bytes_left() == 30
    with path.open("ab") as file:
        file.write(whole[30:])
    assert list(files.new()) == first and files.num_bytes_left() == 0
