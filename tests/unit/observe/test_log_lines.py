"""Logs as services, libraries and the broker write them, whole and damaged."""

import json
import logging
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import TracerProvider

from beamline.coordinator.observe.log_lines import printable, read_lines, tail, text_of
from beamline.runtime.json_log import JsonFormatter, set_up_logging
from beamline.runtime.trace_context import STEP


def formatted(message: str, *arguments: object, error: Exception | None = None) -> str:
    """A log line as the service `trainer` writes it."""
    exc_info = (type(error), error, error.__traceback__) if error else None
    record = logging.LogRecord("beamline.trainer", logging.WARNING, "", 0, message, arguments, exc_info)
    record.created = 1_769_860_800.25
    return JsonFormatter("trainer").format(record)


def test_a_line_has_what_a_search_needs() -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("train step") as span:
        token = context.attach(baggage.set_baggage(STEP, "7"))
        try:
            line = json.loads(formatted("step %d: %s", 7, 'two "quoted"\nlines'))
        finally:
            context.detach(token)
    ids = span.get_span_context()
    assert line == {
        "time": "2026-01-31T12:00:00.250Z",
        "level": "WARNING",
        "worker": "trainer",
        "logger": "beamline.trainer",
        "message": 'step 7: two "quoted"\nlines',
        "step": 7,
        "trace_id": trace.format_trace_id(ids.trace_id),
        "span_id": trace.format_span_id(ids.span_id),
    }


def test_outside_a_step_and_a_span_there_are_none() -> None:
    assert not {"step", "trace_id", "span_id", "exception"} & json.loads(formatted("hello")).keys()


def test_an_exception_is_kept_with_its_traceback() -> None:
    try:
        raise KeyError("a defect")
    except KeyError as error:
        (record,) = read_lines("trainer", [formatted("it ends", error=error).encode()])
    assert record.message == "it ends"
    assert record.exception.splitlines()[0] == "Traceback (most recent call last):"
    assert record.exception.splitlines()[-1] == "KeyError: 'a defect'"


def test_half_a_surrogate_pair_is_written_too() -> None:
    assert json.loads(formatted("a name: \udcff"))["message"] == "a name: \\udcff"


@given(st.text())
def test_what_is_written_is_read(message: str) -> None:
    line = formatted("%s", message)
    assert "\n" not in line
    (record,) = read_lines("trainer", [line.encode()])
    assert record.message == text_of(json.loads(line)["message"])
    assert not any(c in record.message for c in "\x1b\x00\r\x9b")


@given(st.lists(st.binary(max_size=80)))
def test_any_bytes_are_lines(lines: list[bytes]) -> None:
    clean = [line.replace(b"\n", b"") for line in lines]
    records = list(read_lines("trainer", clean))
    assert len(records) == sum(bool(printable(line)) for line in clean)


def test_what_libraries_print_stays_in_its_place() -> None:
    first, second = formatted("first"), formatted("second")
    lines = [b"early", first.encode(), b"[W socket.cpp:1] \x1b[31mred\x1b[0m", b"50%\r100%", b"", second.encode()]
    records = list(read_lines("trainer", lines))
    assert [r.message for r in records] == ["early", "first", "[W socket.cpp:1] red", "100%", "second"]
    assert [r.time for r in records] == ["", *["2026-01-31T12:00:00.250Z"] * 4]
    assert [r.logger for r in records] == ["", "beamline.trainer", "", "", "beamline.trainer"]


def test_a_print_without_an_end_does_not_hide_the_record_behind_it() -> None:
    records = list(read_lines("trainer", [b"loading..." + formatted("done").encode()]))
    assert [r.message for r in records] == ["loading...", "done"]


def test_a_damaged_record_is_shown_as_it_is() -> None:
    damaged = formatted("cut").encode()[:40]
    assert [r.message for r in read_lines("trainer", [damaged])] == [damaged.decode()]


def test_a_raw_traceback_is_an_error_to_its_end() -> None:
    text = b"Traceback (most recent call last):\n  File 'x', line 1\nValueError: no\nafterwards\nerror: a setting"
    levels = [r.level for r in read_lines("reward", text.split(b"\n"))]
    assert levels == ["ERROR", "ERROR", "ERROR", "INFO", "ERROR"]


def test_lines_of_the_broker_have_their_own_time_and_level(monkeypatch: pytest.MonkeyPatch) -> None:
    (record,) = read_lines("nats", [b"[17] 2026/01/31 12:00:00.250000 [WRN] slow"])
    assert (record.level, record.logger, record.message) == ("WARNING", "nats-server", "slow")
    assert record.time.endswith(":00.250Z")
    (empty,) = read_lines("nats", [b"[17] 2026/01/31 12:00:00.250000 [INF] "])
    assert (empty.logger, empty.message) == ("nats-server", "")


def test_the_tail_is_what_a_person_reads(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    assert tail(log) == []
    log.write_text("a line that is cut\n" + formatted("two\nlines") + "\nraw\n")
    assert tail(log) == [
        "a line that is cut", "12:00:00.250 WARNING beamline.trainer: two", "lines", "raw",
    ]  # fmt: skip
    assert tail(log, num_bytes=len(log.read_bytes()) - 1)[0].startswith("12:00:00.250")


def test_warnings_and_libraries_that_log_are_records(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        set_up_logging("reward-0")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("an old setting", stacklevel=1)
        logging.getLogger("some.library").info("hello")
        print("raw", file=sys.stderr)
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = handlers
        root.setLevel(level)
    records = list(read_lines("reward-0", capfd.readouterr().err.encode().splitlines()))
    assert [(r.logger, r.level) for r in records] == [
        ("py.warnings", "WARNING"),
        ("some.library", "INFO"),
        ("", "INFO"),
    ]
    assert "an old setting" in records[0].message
