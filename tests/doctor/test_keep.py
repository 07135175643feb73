"""What an evaluation keeps for the doctor."""

from pathlib import Path

import msgspec

from beamline.coordinator.doctor.keep import NUM_GROUPS, SampleKeeper
from beamline.protocol.messages import Canary, PolicyUpdate, Sampling, ScoredGroup
from beamline.runtime.memory_blobs import MemoryBlobStore
from beamline.runtime.sample_files import read_index, read_kept
from ring_messages import prompt, scored

SAMPLING = Sampling(temperature=0.7, top_p=1.0, max_tokens=8)


async def groups(blobs: MemoryBlobStore, number: int, *, routed: bool, mark: str = "") -> list[ScoredGroup]:
    """The last ones first."""
    found: list[ScoredGroup] = []
    for index in reversed(range(number)):
        group = scored(prompt(index), [1.0, -1.0])
        owner = group.group_id
        tokens = await blobs.put(owner, "trajectories", f"tokens{mark} {index}".encode())
        routes = await blobs.put(owner, "routed_experts", f"routes{mark} {index}".encode()) if routed else None
        found.append(msgspec.structs.replace(group, trajectories=tokens, routed_experts=routes))
    return found


async def update(blobs: MemoryBlobStore, version: int) -> PolicyUpdate:
    manifest = await blobs.put("policy", "manifest", b"manifest %d" % version)
    canary = Canary(tokens=[1, 2], logprobs=[-1.0])
    return PolicyUpdate(step=version, policy_version=version, manifest=manifest, canary=canary, stats={})


async def test_the_first_groups_are_kept_with_their_routes_and_the_manifest(tmp_path: Path):
    blobs = MemoryBlobStore()
    folder = tmp_path / "doctor"
    found = await groups(blobs, NUM_GROUPS + 2, routed=True)
    await SampleKeeper(folder, blobs).keep(4, SAMPLING, found, await update(blobs, 4))
    index = read_index(folder)
    assert (index.policy_version, index.temperature, index.top_p) == (4, 0.7, 1.0)
    assert [read_kept(folder, group.trajectories) for group in index.groups] == [
        b"tokens %d" % number for number in range(NUM_GROUPS)
    ]
    assert read_kept(folder, index.groups[3].routed_experts) == b"routes 3"
    assert read_kept(folder, index.manifest) == b"manifest 4"


async def test_the_next_evaluation_replaces_what_the_one_before_it_left(tmp_path: Path):
    blobs = MemoryBlobStore()
    keeper = SampleKeeper(tmp_path, blobs)
    await keeper.keep(4, SAMPLING, await groups(blobs, 3, routed=True), await update(blobs, 4))
    later = await groups(blobs, 2, routed=False, mark=" later")
    await keeper.keep(5, SAMPLING, later, await update(blobs, 4))
    index = read_index(tmp_path)
    assert index.policy_version == 5 and index.manifest == "", "the manifest was another policy's"
    assert [read_kept(tmp_path, group.trajectories) for group in index.groups] == [b"tokens later 0", b"tokens later 1"]
    assert [group.routed_experts for group in index.groups] == ["", ""]
    await keeper.keep(6, SAMPLING, [], None)
    assert read_index(tmp_path) == index, "an evaluation without a group keeps what there is"
