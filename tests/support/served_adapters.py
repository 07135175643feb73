"""An engine on tiny Beam that serves adapters, and adapters for it: those that transformers has merged, and others."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from beamline.models import tiny
from beamline.protocol import messages as m
from beamline.protocol.adapter import adapters_of
from beamline.protocol.blobs import VersionSpan
from beamline.protocol.lora_config import LoraSection
from beamline.rollout.engine import Completion, Engine, Scored
from beamline.weights.manifest import WeightManifest
from beamline.weights.tensors import Shard
from lora_variants import VARIANTS
from made_adapters import made
from rollout_messages import export, prompt_group
from tiny_engines import load

REFERENCES = Path(__file__).parents[1] / "parity" / "references"
MODEL = "tiny-beam"
VARIANT, HALVED = "norm-alpha2", "norm-alpha1"
"""Of the engine; and another whose adapters are those of half the B to it."""
LORA = VARIANTS[VARIANT]
NUM_SLOTS, NUM_UNDER_WAY = 3, 64
SETTINGS = {"adapter_slots": NUM_SLOTS, "max_num_seqs": NUM_UNDER_WAY, "max_num_batched_tokens": 256}
WORKER = "swapping_worker.SwappingWorker"
TOLERANCE = 1e-4
SCORED_TOLERANCE = 2e-4
"""Between sampling and scoring: adapters as large as these make logits of tens."""
_versions = count(1)


def adapters(lora: LoraSection = LORA, model: str = MODEL, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor, different by seed."""
    spec = tiny.SPECS[model]
    return made(adapters_of(dict(spec.shapes()), lora, spec.num_experts_per_tok), seed)


def halved(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What `HALVED` computes, in an engine for `VARIANT`."""
    return {name: array / 2 if "lora_B" in name else array for name, array in tensors.items()}


@dataclass
class Served:
    """The engine, what it may score, and what it has at the start of a test: the adapters of the reference."""

    engine: Engine
    tokens: list[list[int]]
    references: dict[str, np.ndarray]
    base: np.ndarray
    """Log-probabilities of the tokens without adapters."""
    folder: Path
    version: int = 0

    def new_version(self) -> int:
        return next(_versions)

    def offer(self, tensors: Mapping[str, np.ndarray], parts: int = 1) -> WeightManifest:
        """Exported under a version of its own."""
        return export(self.folder, self.new_version(), tensors, parts)

    async def scores(self, policy: Scored = "served") -> np.ndarray:
        return np.array([await self.engine.score(tokens, policy) for tokens in self.tokens])

    async def assert_serves(self, variant: str = VARIANT, policy: Scored = "served") -> None:
        assert np.abs(await self.scores(policy) - self.references[f"{variant}.logprobs"]).max() < TOLERANCE

    def group(self, number: int, num_samples: int = 1, max_tokens: int = 200) -> m.PromptGroup:
        """Of a prompt that no other number has."""
        prompt = [number % 200 + 3, *self.tokens[number % len(self.tokens)][:24]]
        return prompt_group(prompt, seeds=[number + i for i in range(num_samples)], max_tokens=max_tokens)


def one_span(completion: Completion, version: int) -> bool:
    return completion.version_spans == [VersionSpan(version, 0, len(completion.tokens))]


async def scored(served: Served, group: m.PromptGroup, completion: Completion, policy: Scored = "served") -> np.ndarray:
    """Log-probabilities of a completion's tokens, computed anew."""
    logprobs = await served.engine.score(group.prompt_tokens + completion.tokens, policy)
    return np.array(logprobs)[len(group.prompt_tokens) - 1 :]


async def assert_sampled_from(served: Served, group: m.PromptGroup, completion: Completion, policy: Scored) -> None:
    assert np.abs(await scored(served, group, completion, policy) - completion.logprobs).max() < SCORED_TOLERANCE


def versions_of(completion: Completion) -> list[int]:
    return [span.policy_version for span in completion.version_spans]


def shards(tensors: Mapping[str, np.ndarray]) -> Iterator[Shard]:
    return (Shard.whole(name, array.dtype.name, array) for name, array in tensors.items())


async def serving(engine: Engine, folder: Path) -> Served:
    """With the adapters of `VARIANT`."""
    references = load_file(REFERENCES / f"{MODEL}-lora.safetensors")
    base = load_file(REFERENCES / f"{MODEL}.safetensors")["logprobs"]
    served = Served(engine, [row.tolist() for row in references["tokens"]], references, base, folder)
    manifest = served.offer(adapters())
    await load(engine, manifest)
    served.version = manifest.policy_version
    return served
