"""Which of a run's numbers somebody wants to see: a glob over their names."""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase

from beamline.protocol.errors import ConfigError
from beamline.protocol.metric_schema import METRICS

NUM_NEAREST = 3
_PLACEHOLDER = re.compile(r"<\w+>")
WORKERS = ("rollout-0", "coordinator", "reward", "trainer")


class MetricFilter:
    """Chooses values by name. `*` stands for any text, slashes too; no glob chooses all."""

    def __init__(self, glob: str = "") -> None:
        self._glob = glob

    def of(self, values: Mapping[str, float]) -> dict[str, float]:
        """The values that are wanted."""
        return {name: value for name, value in values.items() if not self._glob or fnmatchcase(name, self._glob)}

    def check(self, known: Collection[str] = ()) -> None:
        """Raises ConfigError with the nearest names for a glob that neither a known name nor the schema can match."""
        if not self._glob or any(fnmatchcase(name, self._glob) for name in known):
            return
        if any(fnmatchcase(name, self._glob) for name in self._spelled()):
            return
        names = sorted({*known, *(metric.name for metric in METRICS)})
        nearest = difflib.get_close_matches(self._glob, names, n=NUM_NEAREST, cutoff=0.0)
        raise ConfigError(f"no metric matches {self._glob!r}: the nearest are {', '.join(map(repr, nearest))}")

    def _spelled(self) -> Iterator[str]:
        """The schema's names, with text in the place of words in angle brackets: a worker's name, or the glob's own."""
        words = [part for part in self._glob.split("/") if "*" not in part]
        for metric in METRICS:
            for word in (*WORKERS, *words) if metric.labels else ("",):
                yield word.join(_PLACEHOLDER.split(metric.name.replace("<k>", "0")))
