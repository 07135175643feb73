"""Every reading of kept samples: in both precisions, with and without the engine's routes, and with each known mistake.

Legend: L loss tokens of all trajectories.
"""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from beamline.algorithms import packing
from beamline.protocol import doctor
from beamline.protocol.adapter import adapter_shapes
from beamline.runtime.adapter_merge import adapters_in
from beamline.runtime.sample_files import write_recomputed
from beamline.trainer.batch import MicroBatch, Trajectory
from beamline.trainer.doctor.samples import Samples
from beamline.trainer.doctor.stored_adapters import Slots, differing_adapters, experts_scaled
from beamline.trainer.doctor.stored_weights import differing_weights
from beamline.trainer.doctor.subject import Subject
from beamline.trainer.megatron import distributed
from beamline.trainer.megatron.build import DTYPES, build_model
from beamline.trainer.megatron.distributed import Layout, Ranks
from beamline.trainer.megatron.head import Head
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.policy import MegatronPolicy
from beamline.trainer.routing import RouteCounts
from beamline.weights.manifest import WeightManifest


class ReadingPolicy(MegatronPolicy):
    """The real policy, which can also be read through another head than its own."""

    @property
    def head(self) -> Head:
        return self._head

    def take_policy(self, checkpoint: Path) -> None:
        """Have the weights of a checkpoint. Raises WeightError for one that does not fit."""
        files, held = self._trained.folder.open(checkpoint), [slot for found in self.slots.values() for slot in found]
        files.check(held)
        files.load(held)

    @property
    def slots(self) -> Slots:
        """Of what the run trains."""
        return self._trained.slots()

    def without_adapters(self) -> AbstractContextManager[None]:
        """Inside, the base alone is read."""
        return self._trained.reference().in_place()

    def read(self, trajectories: Sequence[Trajectory], max_tokens: int, head: Head | None = None) -> np.ndarray:
        """Log-probabilities at the loss tokens, float32 [L], in the order of the trajectories."""
        longest = max(len(trajectory.tokens) for trajectory in trajectories)
        parts = packing.micro_batches([len(t.tokens) for t in trajectories], max(max_tokens, longest))
        own, self._head = self._head, head or self._head
        try:
            found = self.logprobs([MicroBatch.pack([trajectories[i] for i in part]) for part in parts])
        finally:
            self._head = own
        rows: list[np.ndarray] = [np.empty(0, np.float32)] * len(trajectories)
        for part, logprobs in zip(parts, found, strict=True):
            sizes = [trajectories[i].num_loss_tokens for i in part]
            for i, row in zip(part, logprobs.cpu().split(sizes), strict=True):
                rows[i] = row.numpy()
        return np.concatenate(rows)


def recompute(subject: Subject, samples: Samples, folder: Path) -> None:
    """Read the samples in every way and write the readings into the folder.

    Raises ConfigError for a model that cannot be built.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    distributed.start(Ranks(), Layout())
    try:
        readings, counts = _read_all(subject, samples)
    finally:
        distributed.stop()
    layers, agreement = _agreement(counts) if samples.routed else ([], [])
    manifest = samples.manifest
    write_recomputed(
        folder / doctor.READINGS,
        doctor.Recomputed(
            policy_version=subject.policy_version,
            softcap=subject.softcap,
            vocab_size=subject.vocab_size,
            readings={name: memoryview(column.astype("<f4").tobytes()) for name, column in readings.items()},
            num_weights=len(manifest.tensors) if manifest else 0,
            differing_weights=_differing(subject, manifest) if manifest else [],
            layers=layers,
            route_agreement=agreement,
        ),
    )


def _read_all(subject: Subject, samples: Samples) -> tuple[dict[str, np.ndarray], RouteCounts]:
    """The right readings in both precisions, the mistaken ones in the run's; routes are counted in the run's too."""
    readings: dict[str, np.ndarray] = {}
    counts = None
    for dtype in sorted(DTYPES, key=lambda dtype: dtype != subject.dtype):
        policy = _policy(subject, dtype, samples.temperature)
        if samples.routed:
            readings[doctor.reading_name(dtype, "replay")] = policy.read(samples.trajectories, subject.max_tokens)
        counts = counts or policy.take_route_counts()
        readings[doctor.reading_name(dtype, "live")] = policy.read(samples.live(), subject.max_tokens)
        if dtype == subject.dtype:
            readings |= _mistaken(policy, samples, subject)
        del policy
        gc.collect()
    assert counts is not None
    return readings, counts


def _policy(subject: Subject, dtype: str, temperature: float) -> ReadingPolicy:
    model = build_model(subject.model, Layout(), dtype, lora=subject.lora)
    policy = ReadingPolicy(model, AdamWSettings(), temperature)
    if subject.adapters:
        policy.take_policy(subject.adapters.parent)
    return policy


def _differing(subject: Subject, manifest: WeightManifest) -> list[str]:
    if subject.adapters:
        names = adapter_shapes(adapters_in(subject.model, subject.lora))
        return differing_adapters(subject.adapters, names, manifest)
    return differing_weights(subject.model, manifest)


def _mistaken(policy: ReadingPolicy, samples: Samples, subject: Subject) -> dict[str, np.ndarray]:
    """With the run's own routing, one mistake at a time."""
    own = samples if subject.replay else replace(samples, trajectories=samples.live())
    found = {name: policy.read(own.trajectories, subject.max_tokens, head) for name, head in _wrong_heads(policy.head)}
    # A column that stands one place too late is put right by moving it back.
    found[doctor.TOKENS_LATE] = policy.read(own.shifted(-1), subject.max_tokens)
    found[doctor.TOKENS_EARLY] = policy.read(own.shifted(1), subject.max_tokens)
    for name, mistake in _wrong_adapters(policy, subject):
        with mistake:
            found[name] = policy.read(own.trajectories, subject.max_tokens)
    return found


def _wrong_adapters(policy: ReadingPolicy, subject: Subject) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    """Mistakes that a run with adapters may make."""
    if subject.adapters:
        yield doctor.ADAPTERS_LEFT_OUT, policy.without_adapters()
        if subject.lora.normalize_moe_lora:
            yield doctor.EXPERTS_SCALED_BY_RANK, experts_scaled(policy.slots, 1 / subject.shape.top_k)


def _wrong_heads(head: Head) -> Iterator[tuple[str, Head]]:
    """Heads that get softcap or temperature wrong; only those that differ from the right one."""
    if head.temperature != 1.0:
        yield doctor.TEMPERATURE_IGNORED, replace(head, temperature=1.0)
    if head.softcap is not None:
        yield doctor.SOFTCAP_DROPPED, replace(head, softcap=None)
        if head.temperature != 1.0:
            # cap tanh(z / (T cap)): the temperature folded into the weights, where the softcap bends it.
            yield doctor.TEMPERATURE_BEFORE_SOFTCAP, replace(head, softcap=head.softcap * head.temperature)


def _agreement(counts: RouteCounts) -> tuple[list[int], list[float]]:
    replayed_L = counts.pairs_L - counts.fallbacks_L
    layers = np.flatnonzero(replayed_L)
    return layers.tolist(), (counts.agreed_L[layers] / replayed_L[layers]).tolist()
