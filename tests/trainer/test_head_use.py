"""The real policy reads and trains without ever making a matrix of loss tokens by vocabulary entries."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from beamline.algorithms.losses import PolicyLoss
from beamline.models import tiny
from beamline.trainer.batch import MicroBatch
from beamline.trainer.megatron import head as heads
from beamline.trainer.megatron.build import build_model
from beamline.trainer.megatron.distributed import Layout
from beamline.trainer.megatron.optimizer import AdamWSettings
from beamline.trainer.megatron.policy import MegatronPolicy
from trainer_batches import batch
from trainer_tensors_made import LargestTensor

pytest_plugins = ("trainer_engine",)
pytestmark = pytest.mark.usefixtures("one_rank")

MODEL = replace(tiny.TINY_BEAM, vocab_size=4096)
"""With more entries than anything else of it is wide."""


@pytest.fixture(scope="module")
def policy(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> MegatronPolicy:
    directory = tmp_path_factory.mktemp("model")
    tiny.build(MODEL, directory, seed=3, randomise=True)
    return MegatronPolicy(build_model(directory, Layout()), AdamWSettings(), temperature=0.7, with_reference=True)


@pytest.fixture
def micro_batch(policy: MegatronPolicy, monkeypatch: pytest.MonkeyPatch) -> Iterator[MicroBatch]:
    """In small tiles; longer than the hidden size, so that no weight has as many elements as the matrix would."""
    monkeypatch.setattr(heads, "CHUNK_ROWS", 64)
    monkeypatch.setattr(heads, "TILE_BYTES", 64 * 500 * 4)
    (found,) = batch(1, MODEL.vocab_size, 1, num_trajectories=24).mini_batches[0].micro_batches(10_000)
    assert len(found.targets_L) > 2 * MODEL.hidden_size
    yield found
    policy._optimizer.clear()


def check(made: LargestTensor, micro_batch: MicroBatch) -> None:
    assert 0 < made.num_elements < MODEL.vocab_size * len(micro_batch.targets_L) / 2, made.operation


def test_old_and_reference_logprobs(policy: MegatronPolicy, micro_batch: MicroBatch):
    for read in (policy.logprobs, policy.reference_logprobs):
        with LargestTensor() as made:
            read([micro_batch])
        check(made, micro_batch)


@pytest.mark.parametrize("entropy_coefficient", [0.0, 0.01])
def test_training(policy: MegatronPolicy, micro_batch: MicroBatch, entropy_coefficient: float):
    with LargestTensor() as made:
        policy.forward_backward([micro_batch], None, PolicyLoss(entropy_coefficient=entropy_coefficient))
    check(made, micro_batch)
    assert next(policy._model.module.parameters()).grad is not None
