"""The engine's side of kept samples, as columns over all loss tokens.

Legend: L loss tokens of all trajectories, N trajectories.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from beamline.protocol.blobs import Trajectories, decode_blob
from beamline.protocol.doctor import KeptSamples
from beamline.runtime.sample_files import read_kept

type Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class EngineTokens:
    """What the engine said of each token that it sampled."""

    logprobs_L: np.ndarray
    """float64"""
    positions_L: np.ndarray
    """int64: place in the response, from 0."""
    sequences_L: np.ndarray
    """int64: the trajectory."""
    versions_L: np.ndarray
    """int64: the policy; -1 where no span tells."""
    garbled: tuple[int, ...]
    """Trajectories whose tokens do not decode to the text that the engine decoded."""

    @property
    def num_trajectories(self) -> int:
        return int(self.sequences_L.max(initial=-1)) + 1


def read_engine_tokens(folder: Path, samples: KeptSamples, decode: Decode) -> EngineTokens:
    """Raises BlobError for blobs that are missing or damaged."""
    columns: list[tuple[np.ndarray, ...]] = []
    garbled: list[int] = []
    for kept in samples.groups:
        group = decode_blob(Trajectories, read_kept(folder, kept.trajectories))
        ends = np.frombuffer(group.cu_seqlens, "<i4")
        tokens = np.frombuffer(group.tokens, "<i4")
        mask = np.frombuffer(group.loss_mask, np.uint8) > 0
        logprobs = np.frombuffer(group.rollout_logprobs, "<f4").astype(np.float64)
        for sample in range(group.num_trajectories):
            own = slice(ends[sample], ends[sample + 1])
            if decode(tokens[own].tolist()) != group.texts[sample]:
                garbled.append(len(columns))
            versions = np.full(len(tokens[own]), -1, np.int64)
            for span in group.version_spans[sample]:
                versions[span.start : span.end] = span.policy_version
            places = np.flatnonzero(mask[own])
            columns.append((logprobs[own][places], places, np.full(len(places), len(columns)), versions[places]))
    logprobs_L, positions_L, sequences_L, versions_L = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return EngineTokens(logprobs_L, positions_L, sequences_L, versions_L, tuple(garbled))
