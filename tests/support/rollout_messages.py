"""Small messages and weight segments for the rollout tests."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from beamline.protocol import messages as m
from beamline.weights.manifest import WeightManifest
from beamline.weights.shm import ShmExporter

FAR_AWAY = 4e9
"""A deadline, in Unix seconds, that no test reaches."""

TASK = m.Task(prompt_id="p-0", data_source="sums", grader="math_dapo", ground_truth="4")


def prompt_group(
    tokens: list[int],
    *,
    seeds: list[int],
    max_tokens: int = 8,
    temperature: float = 1.0,
    top_p: float = 1.0,
    group_id: str = "g-000001",
    min_policy_version: int = 0,
    deadline: float = FAR_AWAY,
) -> m.PromptGroup:
    return m.PromptGroup(
        group_id=group_id,
        attempt=0,
        purpose=m.Purpose.TRAIN,
        task=TASK,
        prompt_tokens=tokens,
        sampling=m.Sampling(temperature=temperature, top_p=top_p, max_tokens=max_tokens),
        seeds=seeds,
        min_policy_version=min_policy_version,
        deadline=deadline,
    )


def policy_update(version: int, manifest: m.BlobRef, canary: m.Canary) -> m.PolicyUpdate:
    return m.PolicyUpdate(step=version, policy_version=version, manifest=manifest, canary=canary, stats={})


def phase(name: m.PhaseName, *, sequence: int, granted: bool) -> m.Phase:
    return m.Phase(sequence=sequence, step=1, phase=name, policy_version=0, granted=granted)


def export(folder: Path, version: int, tensors: Mapping[str, np.ndarray], keep: int = 8) -> WeightManifest:
    """A segment of float32 tensors under `folder`."""
    named = [
        (name, "float32", list(array.shape), np.ascontiguousarray(array, np.float32)) for name, array in tensors.items()
    ]
    return ShmExporter(folder, keep=keep).export(version, named)
