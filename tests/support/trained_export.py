"""Checkpoints of tiny models that the real trainer has trained, exported as a user does it.

    trainer-python trained_export.py DIR

For each model NAME of MODELS: `<DIR>/NAME/start` is the model, `whole` and `sharded` are exports after NUM_STEPS steps,
the latter from a checkpoint whose weights are in shards of at most SHARD_BYTES. `<DIR>/NAME/scored.safetensors` has
tokens int64 [S, T] and the trainer's log-probabilities, logprobs float32 [S, T - 1].
"""

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from beamline.algorithms.losses import PolicyLoss
from beamline.models import tiny
from beamline.runtime.checkpoints import POLICY, TrainerState
from beamline.runtime.model_identity import ModelIdentity
from beamline.trainer.megatron import distributed
from beamline.trainer.megatron.build import build_model
from beamline.trainer.megatron.distributed import Layout, Ranks
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.policy import MegatronPolicy
from beamline.trainer.train_step import StepConfig, train_step
from beamline.trainer.weights_out import write_safetensors
from saved_checkpoint import save
from trainer_batches import batch

BEAMLINE = Path(__file__).parents[2] / "bin/beamline"
MODELS = ("tiny-beam", "tiny-qwen3-moe")
SEED, NUM_STEPS, LEARNING_RATE = 11, 2, 3e-3
NUM_SEQUENCES, NUM_TOKENS = 2, 96
"""Longer than the sliding window."""
SHARD_BYTES = 2_000_000


def main() -> None:
    torch.set_num_threads(1)
    distributed.start(Ranks(), Layout())
    for name in MODELS:
        export(name, Path(sys.argv[1]) / name)
    distributed.stop()


def export(name: str, directory: Path) -> None:
    """Train, save twice, export both checkpoints, and score."""
    spec, start = tiny.SPECS[name], directory / "start"
    tiny.build(spec, start, seed=SEED, randomise=True)
    policy = MegatronPolicy(build_model(start, Layout()), AdamWSettings(), temperature=1.0)
    for step in range(1, NUM_STEPS + 1):
        train_step(policy, batch(step, spec.vocab_size), StepConfig(PolicyLoss(), 10_000, LEARNING_RATE))

    def in_shards(draft: Path) -> None:
        write_safetensors(policy.export(), draft / POLICY, SHARD_BYTES)

    for kind, write in (("whole", policy.save), ("sharded", in_shards)):
        state = TrainerState(
            step=NUM_STEPS, dtype="float32", model=ModelIdentity.of(start), layout={}, optimizer={"state": "device"}
        )
        checkpoints = directory / f"{kind}-checkpoints"
        save(checkpoints, start, state, write)
        subprocess.run([BEAMLINE, "export", checkpoints / "latest", directory / kind], check=True)
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(spec.vocab_size, (NUM_SEQUENCES, NUM_TOKENS), generator=generator)
    logprobs = torch.tensor([policy.score(row.tolist()) for row in tokens])
    save_file({"tokens": tokens, "logprobs": logprobs}, directory / "scored.safetensors")


if __name__ == "__main__":
    main()
