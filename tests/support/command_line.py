"""`beamline` as a user runs it, in this process."""

from pathlib import Path

import pytest

from beamline.coordinator import cli


def beamline(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Its exit code, and what it prints and says."""
    with pytest.raises(SystemExit) as end:
        cli.main([*map(str, arguments)])
    told = capsys.readouterr()
    return int(end.value.code or 0), told.out, told.err
