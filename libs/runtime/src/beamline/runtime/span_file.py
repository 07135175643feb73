"""Spans of one worker in a file: lines of OTLP/JSON, each written at once, so that a reader sees whole batches."""

import os
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from beamline.runtime.otlp_json import encode_line


class SpanFile(SpanExporter):
    """Appends to the file, which a process before this one may have left with half a line at its end.

    Raises OSError where its folder cannot be made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        end = self._file.seek(0, os.SEEK_END)
        if end:
            self._file.seek(end - 1)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._file.write(encode_line(spans[0].resource, spans))
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()
