"""Kept samples as trajectories in memory, checked against the model that will read them."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from beamline.models.routing import RoutingShape
from beamline.protocol.blobs import RoutedExperts, Trajectories, decode_blob
from beamline.protocol.errors import BlobError
from beamline.runtime.sample_files import read_index, read_kept
from beamline.trainer.assemble import Columns
from beamline.trainer.batch import Trajectory
from beamline.trainer.routing import traces
from beamline.weights.manifest import WeightManifest


@dataclass(frozen=True)
class Samples:
    """What an engine sampled."""

    temperature: float
    trajectories: list[Trajectory]
    """In the order of groups and samples."""
    manifest: WeightManifest | None
    """Of the weights that the engine verified."""

    @property
    def routed(self) -> bool:
        return any(trajectory.routes is not None for trajectory in self.trajectories)

    def live(self) -> list[Trajectory]:
        """Without the engine's routes."""
        return [replace(trajectory, routes=None) for trajectory in self.trajectories]

    def shifted(self, by: int) -> list[Trajectory]:
        """Every response rolled by `by` tokens; what leaves it at one end enters at the other."""
        return [replace(trajectory, tokens=_roll(trajectory, by)) for trajectory in self.trajectories]


def read_samples(folder: Path, shape: RoutingShape, vocab_size: int) -> Samples:
    """Every trajectory with a response. Raises BlobError for files that are damaged or do not fit the model."""
    index = read_index(folder)
    trajectories: list[Trajectory] = []
    for kept in index.groups:
        group = decode_blob(Trajectories, read_kept(folder, kept.trajectories))
        columns = Columns(group, data_source=0)
        highest = max(int(column.max(initial=0)) for column in (columns.prompt, columns.tokens))
        if highest >= vocab_size:
            raise BlobError(
                f"{folder / kept.trajectories}: token {highest} is outside the model's vocabulary of {vocab_size}: "
                "give the model that it was sampled from"
            )
        if kept.routed_experts:
            routed = decode_blob(RoutedExperts, read_kept(folder, kept.routed_experts))
            columns.routes = traces(routed, group.group_id, columns.num_trace_rows, shape)
        begun = np.flatnonzero(np.diff(columns.ends)).tolist()
        trajectories += [columns.trajectory(sample, 0.0) for sample in begun]
    if not sum(trajectory.num_loss_tokens for trajectory in trajectories):
        raise BlobError(f"{folder} holds no sampled token: delete it and sample anew")
    manifest = WeightManifest.decode(read_kept(folder, index.manifest)) if index.manifest else None
    return Samples(index.temperature, trajectories, manifest)


def _roll(trajectory: Trajectory, by: int) -> np.ndarray:
    prompt, response = np.split(trajectory.tokens, [trajectory.num_prompt_tokens])
    return np.concatenate((prompt, np.roll(response, by)))
