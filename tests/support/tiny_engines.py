"""What the tests of real engines on tiny models share."""

import numpy as np

from beamline.protocol.config import EngineSection
from beamline.rollout.engine import Completion

MAX_MODEL_TOKENS = 512
# Prompts of 96 tokens arrive in chunks of at most 64, mixed with decoding, across cached blocks of 32.
ENGINE = EngineSection(kv_cache_mib=64, max_num_seqs=32, max_num_batched_tokens=64, block_size=32)


def routes_of(completion: Completion) -> np.ndarray:
    """Expert ids [rows, layers, top_k] of a completion, in rising order: which they are is what counts."""
    trace = completion.routed_experts
    assert trace is not None
    return np.sort(np.frombuffer(trace.ids, trace.dtype).reshape(-1, trace.num_layers, trace.top_k), axis=-1)
