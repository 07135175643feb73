"""vLLM's own statistics of each engine step, into an `EngineMeter`."""

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from beamline.rollout.engine_meter import EngineMeter


def measure(llm: AsyncLLM) -> EngineMeter:
    """Have the engine's statistics written into a meter, and nowhere else: vLLM's own loggers cost more than that.

    The engine must have been made with statistics. What vLLM reads off outputs is not used, but for their tokens: they
    come late and put together. Prompt tokens are for whoever makes the requests to count.
    """
    meter = EngineMeter()
    assert llm.logger_manager is not None, "made without statistics"
    llm.logger_manager.stat_loggers = [_Recorder(meter)]
    return meter


class _Recorder(AggregateStatLoggerBase):
    def __init__(self, meter: EngineMeter) -> None:
        self._meter = meter

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        meter = self._meter
        if scheduler_stats is not None:
            meter.num_running = scheduler_stats.num_running_reqs
            meter.num_waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            meter.fill(scheduler_stats.kv_cache_usage)
            meter.num_looked_up += scheduler_stats.prefix_cache_stats.queries
            meter.num_hits += scheduler_stats.prefix_cache_stats.hits
            meter.num_preemptions += scheduler_stats.prefix_cache_stats.preempted_requests
        if iteration_stats is not None:
            meter.num_generated_tokens += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
