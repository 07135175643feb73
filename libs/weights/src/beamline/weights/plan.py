"""Which bytes of a policy one rank of an engine needs: worked out once for two layouts, used for every policy after."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from beamline.protocol.errors import WeightError
from beamline.weights.manifest import Piece, TensorEntry, WeightManifest
from beamline.weights.tensors import Box, common
from beamline.weights.transport import Range

type Needs = Mapping[str, Sequence[Box]]
"""Of every tensor that a rank loads, the boxes that it keeps. A tensor that is missing here is not loaded at all."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to fetch. Indices are those of the manifest."""

    tensors: list[tuple[int, list[int]]]
    """Each needed tensor, and its needed pieces."""
    ranges: list[list[Range]]
    """Of each place, in rising order; neighbours are joined."""

    @property
    def num_bytes(self) -> int:
        return sum(size for ranges in self.ranges for _, size in ranges)


def make_plan(manifest: WeightManifest, needs: Needs | None = None) -> Plan:
    """The plan for all manifests of this one's layout; without `needs` everything is fetched.

    A piece is fetched whole where any of it is needed, so that its checksum can be checked.

    Raises:
        WeightError: the policy lacks something that is needed.
    """
    tensors: list[tuple[int, list[int]]] = []
    used: list[list[Range]] = [[] for _ in manifest.places]
    for index, entry in enumerate(manifest.tensors):
        boxes = [tuple((0, size) for size in entry.shape)] if needs is None else needs.get(entry.name)
        if not boxes:
            continue
        pieces = _pieces(entry, boxes)
        tensors.append((index, pieces))
        for number in pieces:
            piece = entry.pieces[number]
            used[piece.place].append((piece.offset, entry.num_bytes(piece)))
    missing = set(needs or ()) - {entry.name for entry in manifest.tensors}
    if missing:
        raise WeightError(
            f"policy {manifest.policy_version}: tensor {min(missing)} is missing, one of {len(missing)}: "
            "export the whole model"
        )
    return Plan(tensors, [_joined(ranges) for ranges in used])


def needed(manifest: WeightManifest, plan: Plan) -> list[tuple[TensorEntry, list[Piece]]]:
    """Each needed tensor with its needed pieces."""
    return [
        (manifest.tensors[index], [manifest.tensors[index].pieces[number] for number in pieces])
        for index, pieces in plan.tensors
    ]


def _pieces(entry: TensorEntry, boxes: Sequence[Box]) -> list[int]:
    """Indices of the pieces in which these boxes lie."""
    found: set[int] = set()
    for box in boxes:
        if len(box) != len(entry.shape):
            raise WeightError(f"{entry}: {len(box)} dimensions are needed, is the model the same on both sides?")
        parts = [common(piece.box, box) for piece in entry.pieces]
        if sum(parts) != math.prod(last - first for first, last in box):
            bounds = ", ".join(f"{first}:{last}" for first, last in box)
            raise WeightError(f"{entry}: its pieces do not make up [{bounds}], which is needed: export all of it")
        found.update(number for number, part in enumerate(parts) if part)
    return sorted(found)


def _joined(ranges: list[Range]) -> list[Range]:
    joined: list[Range] = []
    for offset, size in sorted(ranges):
        if joined and joined[-1][0] + joined[-1][1] >= offset:
            first = joined[-1][0]
            joined[-1] = (first, max(joined[-1][1], offset + size - first))
        else:
            joined.append((offset, size))
    return [(offset, size) for offset, size in joined if size]
