"""The chart library of every page, bundled once for each of its versions."""

import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

KEPT_IN = Path(sys.prefix) / "share" / "beamline"
"""Goes with the environment that it was made in."""


@cache
def chart_library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that sets `window.vegaEmbed`."""
    return kept(KEPT_IN / f"charts-{version('vl-convert-python')}.js", _bundle)


def kept(path: Path, make: Callable[[], str]) -> str:
    """A file's text; if there is no such file, what `make` returns, which is kept there where that can be written."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    text = make()
    with suppress(OSError):  # an environment that may only be read
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under a name of its own first: several processes may make it, and none may read half of it.
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    return text


def _bundle() -> str:
    """Takes seconds."""
    import vl_convert

    return vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]  # its stub lacks the default
