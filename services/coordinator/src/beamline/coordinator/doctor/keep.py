"""What a run keeps for the doctor: the raw blobs of a few evaluated groups, with the weights' manifest."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

from beamline.protocol.doctor import INDEX, KeptGroup, KeptSamples
from beamline.protocol.messages import PolicyUpdate, Sampling, ScoredGroup
from beamline.runtime.blob_store import BlobStore
from beamline.runtime.sample_files import write_index

NUM_GROUPS = 8
MANIFEST = "manifest.bin"


class SampleKeeper:
    """Writes into one folder; each evaluation replaces what the one before it left.

    Args:
        folder: made when missing.
        blobs: where the groups' blobs and the manifest lie.
    """

    def __init__(self, folder: Path, blobs: BlobStore) -> None:
        self._folder = folder
        self._blobs = blobs

    async def keep(
        self, step: int, sampling: Sampling, groups: Iterable[ScoredGroup], update: PolicyUpdate | None
    ) -> None:
        """Keep the first groups of an evaluation of policy `step`.

        Args:
            sampling: how they were sampled.
            update: the newest policy that was heard of; another one's manifest is not kept.
        """
        files: dict[str, bytes | memoryview] = {}
        kept: list[KeptGroup] = []
        for number, scored in enumerate(sorted(groups, key=lambda scored: scored.group_id)[:NUM_GROUPS]):
            group = KeptGroup(
                trajectories=f"group-{number}.trajectories",
                routed_experts=f"group-{number}.routed_experts" if scored.routed_experts else "",
            )
            files[group.trajectories] = await self._blobs.get(scored.trajectories)
            if scored.routed_experts is not None:
                files[group.routed_experts] = await self._blobs.get(scored.routed_experts)
            kept.append(group)
        if not kept:
            return
        manifest = update.manifest if update is not None and update.policy_version == step else None
        if manifest is not None:
            files[MANIFEST] = await self._blobs.get(manifest)
        samples = KeptSamples(
            policy_version=step,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            manifest=MANIFEST if manifest is not None else "",
            groups=kept,
        )
        await asyncio.to_thread(self._write, files, samples)

    def _write(self, files: dict[str, bytes | memoryview], samples: KeptSamples) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / INDEX).unlink(missing_ok=True)
        for name, content in files.items():
            (self._folder / name).write_bytes(content)
        write_index(self._folder, samples)
