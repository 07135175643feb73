"""The slots of adapters: whatever is served, staged and asked for, a slot that is read is never given to a version."""

import random
from collections.abc import Callable

import pytest

from beamline.rollout.lora.versions import AdapterVersions


def offer(versions: AdapterVersions, version: int) -> int | None:
    """Stage a version where there is room for it; returns its slot."""
    versions.drop()
    slot = versions.find(version, f"of {version}")
    slot = versions.make_room() if slot is None else slot
    if slot is not None:
        versions.stage(slot, version, f"of {version}")
    return slot


def read_by(versions: AdapterVersions, id: int) -> tuple[int, int]:
    """Slot and version."""
    ((slot, version),) = [(slot, version) for one, slot, version in versions.bindings if one == id]
    return slot, version


def begin(versions: AdapterVersions) -> int:
    versions.begin(versions.served)
    return versions.served


def test_the_model_without_adapters_is_served_first():
    versions = AdapterVersions(2, 7)
    assert versions.bindings == [(versions.served, 0, 7)] and versions.staged is None


def test_a_staged_version_has_an_id_and_a_slot_that_nothing_else_has():
    versions = AdapterVersions(2, 0)
    assert offer(versions, 1) == 1 and versions.staged != versions.served
    assert read_by(versions, versions.served) == (0, 0)
    assert versions.staged is not None and read_by(versions, versions.staged) == (1, 1)
    versions.drop()
    assert versions.bindings == [(versions.served, 0, 0)]


def test_a_version_that_is_rebound_is_read_by_requests_under_way():
    versions = AdapterVersions(2, 0)
    id = begin(versions)
    offer(versions, 1)
    versions.rebind()
    assert read_by(versions, id) == (1, 1) and versions.served == id and len(versions.bindings) == 1


def test_a_version_served_beside_leaves_requests_under_way_theirs_to_their_end():
    versions = AdapterVersions(2, 0)
    old = begin(versions)
    offer(versions, 1)
    versions.serve_beside()
    new = begin(versions)
    assert (read_by(versions, old), read_by(versions, new)) == ((0, 0), (1, 1))
    assert offer(versions, 2) is None
    versions.end(old)
    assert offer(versions, 2) == 0
    assert old not in {id for id, _, _ in versions.bindings}


def test_more_versions_than_slots_are_refused_with_who_holds_them_and_what_to_do():
    versions = AdapterVersions(2, 3)
    for _ in range(12):
        begin(versions)
    offer(versions, 4)
    versions.serve_beside()
    begin(versions)
    assert offer(versions, 5) is None
    assert str(versions.full(5)) == (
        "policy 5: no adapter slot is free: slot 0 has policy 3 (12 requests under way), slot 1 has policy 4 (1 "
        "requests under way, served): let those requests end, or raise rollout.engine.adapter_slots=2"
    )


def test_the_version_before_is_found_in_its_slot_until_that_is_written():
    versions = AdapterVersions(2, 0)
    for version in (1, 2):
        offer(versions, version)
        versions.rebind()
    assert versions.find(1, "of 1") is not None
    assert versions.find(1, "of another run's 1") is None and versions.find(3, "of 1") is None
    assert offer(versions, 1) == versions.find(1, "of 1"), "it is put back where it lies"
    assert versions.is_new
    versions.rebind()
    offer(versions, 3)
    versions.rebind()
    assert versions.find(2, "of 2") is None


def test_a_version_that_was_refused_is_loaded_again():
    versions = AdapterVersions(2, 0)
    slot = offer(versions, 1)
    versions.drop()
    assert versions.find(1, "of 1") is None and versions.make_room() == slot


def test_a_version_that_all_read_already_is_not_new():
    versions = AdapterVersions(2, 0)
    offer(versions, 1)
    versions.rebind()
    offer(versions, 1)
    assert not versions.is_new
    begin(versions)
    offer(versions, 2)
    versions.serve_beside()
    offer(versions, 1)
    assert versions.is_new


def test_the_slot_that_was_not_used_for_longest_is_written_first():
    versions = AdapterVersions(4, 0)
    slots = []
    for version in range(1, 7):
        slots.append(offer(versions, version))
        versions.rebind()
    assert slots == [1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("num_slots", [2, 3, 5])
def test_no_slot_that_is_read_is_ever_written(num_slots: int, seed: int):
    """Requests come, end, and see another version than the one they began with by a rebind alone."""
    rng, versions, newest = random.Random(seed), AdapterVersions(num_slots, 0), 0
    under_way: list[int] = []
    seen: dict[int, tuple[int, int]] = {}
    """What an id last stood for."""

    def come() -> None:
        under_way.append(begin(versions))

    def end() -> None:
        if under_way:
            versions.end(under_way.pop(rng.randrange(len(under_way))))

    def load() -> None:
        nonlocal newest
        newest += 1
        read = {read_by(versions, id)[0] for id in (*under_way, versions.served)}
        slot = offer(versions, newest)
        assert (slot is None) == (len(read) == num_slots) and slot not in read
        if slot is None:
            return
        if rng.random() < 0.2:
            versions.drop()
            return
        if rng.random() < 0.5:
            versions.serve_beside()
        else:
            versions.rebind()
            seen.clear()
        assert read_by(versions, versions.served) == (slot, newest)

    for _ in range(200):
        actions: list[Callable[[], None]] = [come, come, end, end, load]
        rng.choice(actions)()
        bindings = {id: (slot, version) for id, slot, version in versions.bindings}
        assert bindings.keys() >= {*under_way, versions.served}
        assert all(bindings[id] == stood for id, stood in seen.items() if id in bindings)
        assert {id for id in seen if id not in bindings}.isdisjoint(under_way)
        seen |= bindings
