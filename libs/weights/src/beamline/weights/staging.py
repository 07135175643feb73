"""A whole policy on the side of one engine rank: fetched from all its places, and checked before anything is used."""

from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from beamline.protocol.errors import WeightError
from beamline.weights.choice import reader_of
from beamline.weights.manifest import Piece, Place, TensorEntry, WeightManifest
from beamline.weights.plan import Needs, Plan, make_plan, needed
from beamline.weights.tensors import ITEM_BYTES, STORAGE
from beamline.weights.transport import Attached, Content, DeviceBytes, Reader


class Stage:
    """Fetches policies for one rank. Close it at the end.

    Args:
        needs: what the rank keeps of each tensor; None for everything.
    """

    def __init__(self, needs: Needs | None = None) -> None:
        self._needs = needs
        self._readers: dict[str, Reader] = {}
        """By kind of transport."""
        self._plans: dict[str, Plan] = {}
        """The last one, by its layout: a trainer keeps the same."""

    def fetch(self, manifest: WeightManifest) -> "Staged":
        """Attach, fill and verify a policy. What is served meanwhile is not touched.

        Raises:
            WeightError: something is missing, late or damaged; nothing is held on to.
        """
        plan = self._plan(manifest)
        staged = Staged(manifest, plan, [])
        try:
            for place, ranges in zip(manifest.places, plan.ranges, strict=True):
                attached = self._reader(place).attach(place, manifest.policy_version) if ranges else None
                staged.attached.append(attached)
                if attached is not None:
                    attached.fill(ranges)
            staged.verify()
        except BaseException:
            staged.fence()
            raise
        return staged

    def close(self) -> None:
        """Let go of everything."""
        for reader in self._readers.values():
            reader.close()
        self._readers = {}

    def _plan(self, manifest: WeightManifest) -> Plan:
        layout = manifest.layout
        if layout not in self._plans:
            self._plans = {layout: make_plan(manifest, self._needs)}
        return self._plans[layout]

    def _reader(self, place: Place) -> Reader:
        kind = type(place).__name__
        if kind not in self._readers:
            self._readers[kind] = reader_of(place)
        return self._readers[kind]


class Staged:
    """A policy that is ready to be loaded. Its bytes are valid until `fence`."""

    def __init__(self, manifest: WeightManifest, plan: Plan, attached: list[Attached | None]) -> None:
        """Use `Stage.fetch`."""
        self.manifest = manifest
        self.attached = attached
        self._plan = plan

    @property
    def num_bytes(self) -> int:
        """That were needed."""
        return self._plan.num_bytes

    def pieces(self) -> Iterator[tuple[TensorEntry, list[tuple[Piece, Content]]]]:
        """Each needed tensor with its needed pieces, in the manifest's order."""
        for entry, pieces in needed(self.manifest, self._plan):
            yield entry, [(piece, self._content(entry, piece)) for piece in pieces]

    def tensors(self) -> Iterator[tuple[TensorEntry, Content]]:
        """Each needed tensor as one contiguous buffer: what was fetched where that is whole, else put together.

        Putting together is done in main memory. Elements that the rank does not need are anything.
        """
        for entry, pieces in self.pieces():
            if len(pieces) == 1 and pieces[0][0].shape == entry.shape:
                yield entry, pieces[0][1]
            else:
                yield entry, _together(entry, pieces)

    def verify(self) -> None:
        """Check the checksum of every needed piece. Raises WeightError naming the first that differs."""
        for entry, pieces in self.pieces():
            for piece, content in pieces:
                checksum = _checksum(content)
                if checksum != piece.checksum:
                    raise WeightError(
                        f"policy {self.manifest.policy_version}: tensor {entry.name} has checksum {checksum}, expected "
                        f"{piece.checksum}: its bytes were damaged, or written over, on the way"
                    )

    def fence(self) -> None:
        """The bytes are needed no more. A second call does nothing."""
        for attached in self.attached:
            if attached is not None:
                attached.fence()

    def _content(self, entry: TensorEntry, piece: Piece) -> Content:
        attached = self.attached[piece.place]
        assert attached is not None, "the plan has no range of it"
        return attached.content(piece.offset, entry.num_bytes(piece))


def _together(entry: TensorEntry, pieces: Sequence[tuple[Piece, Content]]) -> np.ndarray:
    kind = STORAGE[ITEM_BYTES[entry.dtype]]
    whole = np.empty(entry.shape, kind)
    for piece, content in pieces:
        inside = tuple(slice(first, last) for first, last in piece.box)
        host = b"".join(content.host_parts()) if isinstance(content, DeviceBytes) else content
        whole[inside] = np.frombuffer(host, kind).reshape(piece.shape)
    return whole


def _checksum(content: Content) -> str:
    if not isinstance(content, DeviceBytes):
        return xxhash.xxh3_64_hexdigest(content)
    checksum = xxhash.xxh3_64()
    for part in content.host_parts():
        checksum.update(part)
    return checksum.hexdigest()
