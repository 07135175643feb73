"""A sampler that counts what it makes, and the rollout worker's numbers under the names of the metric schema."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from beamline.protocol.messages import FinishReason, PromptGroup
from beamline.rollout.engine import Completion, Sampler
from beamline.rollout.engine_meter import EngineMeter


class MeteredSampler:
    """Implements `Sampler`.

    Args:
        worker: this worker's name.
        sampler: makes the trajectories.
        meter: of the engine below.
        now: monotonic clock in seconds.
    """

    def __init__(
        self, worker: str, sampler: Sampler, meter: EngineMeter, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._worker = worker
        self._sampler = sampler
        self._meter = meter
        self._now = now
        self._taken = replace(meter)
        self._num_under_way = 0
        self._busy_since = 0.0
        self._start()

    async def generate(self, group: PromptGroup, stop: asyncio.Event | None = None) -> list[Completion]:
        self._enter()
        try:
            completions = await self._sampler.generate(group, stop)
        finally:
            self._leave()
        reasons = [completion.finish_reason for completion in completions]
        self._num_groups += 1
        self._num_samples += len(reasons)
        self._num_aborted += reasons.count(FinishReason.ABORT)
        return completions

    def gauges(self) -> dict[str, float]:
        """`engine/*` at this moment. An engine without work may not have said so."""
        works, meter = self._num_under_way > 0, self._meter
        values = {
            "running": float(meter.num_running) if works else 0.0,
            "waiting": float(meter.num_waiting) if works else 0.0,
            "kv_cache": meter.kv_cache,
        }
        return self._named(values)

    def take(self) -> dict[str, float]:
        """`engine/*` since the last call. Shares of nothing are left out."""
        self._add_busy()
        meter, before = self._meter, self._taken
        self._taken = replace(meter)
        num_generated = meter.num_generated_tokens - before.num_generated_tokens
        num_looked_up = meter.num_looked_up - before.num_looked_up
        values = {
            "groups": float(self._num_groups),
            "samples": float(self._num_samples),
            "aborted": float(self._num_aborted),
            "prompt_tokens": float(meter.num_prompt_tokens - before.num_prompt_tokens),
            "generated_tokens": float(num_generated),
            "busy_s": self._busy_s,
            "preemptions": float(meter.num_preemptions - before.num_preemptions),
            "kv_cache_peak": meter.kv_cache_peak,
        }
        if self._busy_s > 0:
            values["tokens_per_s"] = num_generated / self._busy_s
        if num_looked_up:
            values["prefix_hits"] = (meter.num_hits - before.num_hits) / num_looked_up
        meter.kv_cache_peak = meter.kv_cache
        self._start()
        return self._named(values)

    def _named(self, values: dict[str, float]) -> dict[str, float]:
        return {f"engine/{name}/{self._worker}": value for name, value in values.items()}

    def _start(self) -> None:
        self._num_groups = self._num_samples = self._num_aborted = 0
        self._busy_s = 0.0

    def _enter(self) -> None:
        self._add_busy()
        self._num_under_way += 1

    def _leave(self) -> None:
        self._add_busy()
        self._num_under_way -= 1

    def _add_busy(self) -> None:
        """Count the time since the last change, where something was under way."""
        now = self._now()
        if self._num_under_way:
            self._busy_s += now - self._busy_since
        self._busy_since = now
