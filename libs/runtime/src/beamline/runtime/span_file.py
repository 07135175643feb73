"""Spans of one worker in a file: lines of OTLP/JSON, each written at once, so that a reader sees whole batches."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from beamline.protocol.errors import ConfigError
from beamline.runtime.otlp_json import encode_line

log = logging.getLogger(__name__)


class SpanFile(SpanExporter):
    """Appends to the file, which a process before this one may have left with half a line at its end.

    A batch that cannot be written, as on a full disk, is lost; that is said once, and the run goes on.

    Raises:
        ConfigError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"spans cannot be written ({error}): mend that, or set telemetry.traces=false") from error
        self._is_said = False
        end = self._file.seek(0, os.SEEK_END)
        if end:
            self._file.seek(end - 1)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            self._file.write(encode_line(spans[0].resource, spans))
        except OSError as error:
            if not self._is_said:
                self._is_said = True
                log.warning("spans are lost, for %s cannot be written: %s", self._file.name, error)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()
