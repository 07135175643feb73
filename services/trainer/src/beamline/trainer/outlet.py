"""How weights leave the trainer: every rank exports its own shards, and rank 0 joins what all ranks say of theirs."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from beamline.protocol.errors import WeightError
from beamline.trainer.policy import Policy
from beamline.weights.manifest import WeightManifest, merge
from beamline.weights.transport import Owner


@dataclass(frozen=True, kw_only=True)
class Outlet:
    """One rank's."""

    owner: Owner
    cuts: int = 1
    """Tensor-parallel ranks of an engine: shards are cut where theirs begin, so that each piece is what one needs."""
    on_device: bool = False
    """Whether the owner takes shards that lie on a GPU."""

    def export(self, policy_version: int, policy: Policy) -> bytes:
        """Hand this rank's shards to its owner; returns for `join` a part of the manifest, or why there is none.

        An error that the other ranks cannot know of would leave them waiting for this one.
        """
        try:
            self.owner.export(policy_version, policy.shards(self.cuts, self.on_device))
        except WeightError as error:
            return _encoder.encode(_Failed(str(error)))
        return self.owner.describe().encode()


def join(parts: Sequence[bytes]) -> WeightManifest:
    """The manifest of the whole policy, from every rank's part in the order of ranks.

    Raises WeightError: a rank could not export, or the parts do not make up a policy.
    """
    found = [_decoder.decode(part) for part in parts]
    for rank, part in enumerate(found):
        if isinstance(part, _Failed):
            raise WeightError(f"rank {rank} of the trainer cannot export its weights: {part.error}")
    return merge([part for part in found if isinstance(part, WeightManifest)])


class _Failed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="Failed/1"):
    error: str


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[WeightManifest | _Failed] = msgspec.msgpack.Decoder(WeightManifest | _Failed)
