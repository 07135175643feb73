"""A rank of a real engine that remembers which policies it sampled side by side, and what it opened for writing."""

import gc
import os
import sys
from typing import Any

from beamline.rollout.engine_worker import EngineWorker
from beamline.rollout.resident_pages import give_back_heap


class SwappingWorker(EngineWorker):
    """Takes notes from `watch` on."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._together: set[tuple[int, ...]] = set()
        self._written: list[str] = []
        self._watches = False
        sys.addaudithook(self._on_event)

    def _versions_of_batch(self) -> list[int]:
        versions = super()._versions_of_batch()
        self._together.add(tuple(sorted(set(versions))))
        return versions

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if self._watches and event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self._written.append(str(args[0]))

    def watch(self) -> None:
        """Forget what was noted, and note from here on."""
        self._together.clear()
        self._written.clear()
        self._watches = True

    def noted(self) -> tuple[list[list[int]], list[str]]:
        """The sets of policies that had requests in one step; and the files opened for writing."""
        self._watches = False
        return [list(versions) for versions in self._together], self._written

    def resident_beside_cache(self) -> int:
        """Bytes of this process but those of the key-value cache, which fills as it is used, and of freed memory."""
        gc.collect()
        give_back_heap()
        resident, cache = self.beamline_memory()
        return resident - cache
