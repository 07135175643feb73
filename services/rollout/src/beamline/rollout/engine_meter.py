"""What an engine has done, step by step of its own, and how full it is."""

from dataclasses import dataclass


@dataclass
class EngineMeter:
    """Written by the engine, read by the service. Counts are since the engine's start; shares lie in [0, 1]."""

    num_running: int = 0
    """Requests that are being decoded."""
    num_waiting: int = 0
    """Requests that wait for a place."""
    kv_cache: float = 0.0
    """How full the key-value cache is."""
    kv_cache_peak: float = 0.0
    """The fullest that it was since this was last set to 0."""
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_looked_up: int = 0
    """Tokens that were looked for in the prefix cache."""
    num_hits: int = 0
    """Those of them that it had."""
    num_preemptions: int = 0
    """Times that a request lost its place in the cache."""

    def fill(self, kv_cache: float) -> None:
        """How full the cache is now."""
        self.kv_cache = kv_cache
        self.kv_cache_peak = max(self.kv_cache_peak, kv_cache)
