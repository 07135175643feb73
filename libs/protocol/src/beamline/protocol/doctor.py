"""Files by which the doctor's environments talk: samples kept of an engine, and the trainer's readings of them.

A folder of samples holds `samples.json` (KeptSamples), one blob a group and kind, and the manifest of the weights that
the engine had verified; `readings.bin` (Recomputed) is what the trainer makes of them. Legend: L loss tokens of all
trajectories, in the order of groups, trajectories and tokens.
"""

from typing import Literal

import msgspec

from beamline.protocol.lora_config import LoraSection
from beamline.protocol.messages import PromptGroup

INDEX = "samples.json"
READINGS = "readings.bin"

TEMPERATURE_IGNORED = "temperature ignored"
TEMPERATURE_BEFORE_SOFTCAP = "temperature before softcap"
SOFTCAP_DROPPED = "softcap dropped"
TOKENS_LATE = "tokens one late"
TOKENS_EARLY = "tokens one early"
ADAPTERS_LEFT_OUT = "adapters left out"
EXPERTS_SCALED_BY_RANK = "experts scaled by alpha / rank"
"""In the place of alpha by their own, smaller rank: as a reader does that knows one scale for all adapters."""

type Routing = Literal["replay", "live"]


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what lies in a file."""


class KeptGroup(_File, kw_only=True):
    """File names inside the folder."""

    trajectories: str
    routed_experts: str = ""
    """Empty where the engine recorded no routes."""


class KeptSamples(_File, kw_only=True):
    """What an engine sampled, and under what."""

    policy_version: int
    temperature: float
    top_p: float
    manifest: str = ""
    """File with the encoded WeightManifest of the policy; empty where it is not known."""
    groups: list[KeptGroup]


class SampleRequest(_File, kw_only=True):
    """What the doctor asks an engine for."""

    model: str
    """Hugging Face directory."""
    dtype: str
    policy_version: int
    groups: list[PromptGroup]
    lora: LoraSection = LoraSection()
    """Of the run, where it trained adapters."""
    adapters: str = ""
    """Their directory in PEFT's format; empty where `model` is all of the policy."""


class ReadRequest(_File, kw_only=True):
    """What the doctor asks the trainer for."""

    model: str
    """A checkpoint's folder, or a Hugging Face directory."""
    dtype: str
    """Precision of the run."""
    replay: bool
    """Whether the run replays the engine's routes."""
    max_tokens: int
    """Of one micro-batch."""
    lora: LoraSection = LoraSection()
    """Of the run, where it trained adapters."""
    base: str = ""
    """Hugging Face directory that a checkpoint's adapters are of; empty where there are none."""


class Recomputed(_File, kw_only=True, tag="Recomputed/1"):
    """Log-probabilities of the kept tokens in the trainer, each reading a float32 column [L]."""

    policy_version: int
    """Of the checkpoint; -1 for a model that is none."""
    softcap: float | None
    vocab_size: int
    readings: dict[str, memoryview]
    """`<dtype>/<routing>` for what a trainer may do rightly, and the names above for what one may do wrongly."""
    num_weights: int
    differing_weights: list[str]
    """Tensors whose checksum is not the one that the engine verified."""
    layers: list[int]
    """Layers with experts."""
    route_agreement: list[float]
    """Of each of these layers: share of the engine's experts that the trainer would choose. Empty without routes."""


def reading_name(dtype: str, routing: Routing) -> str:
    """Name of a reading that has nothing wrong."""
    return f"{dtype}/{routing}"
