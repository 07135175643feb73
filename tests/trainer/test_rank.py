"""What a rank does with a command, and how it reaches the other ranks; on a table policy."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from beamline.algorithms.loss_check import checked_loss
from beamline.algorithms.losses import PolicyLoss
from beamline.protocol.config import ParallelSection, RunConfig, TrainerSection
from beamline.protocol.errors import ConfigError
from beamline.protocol.messages import TrainBatch
from beamline.trainer import commands
from beamline.trainer.batch import Batch
from beamline.trainer.commands import AnyCommand, Export, Join, Save, SaveWeights, Score, Train, Trim
from beamline.trainer.fake_policy import FakePolicy
from beamline.trainer.outlet import Outlet
from beamline.trainer.peers import Alone
from beamline.trainer.policy import NotSaved
from beamline.trainer.rank import Rank, StepSettings
from beamline.trainer.threads import num_threads
from beamline.weights.shm import ShmOwner
from trainer_batches import batch

VOCAB = 11
MESSAGE = TrainBatch(step=1, groups=[], mini_batches=[])
SETTINGS = StepSettings(loss=PolicyLoss(), max_tokens=64)


class BusyPeer(Alone):
    """Another rank needs seven micro-batches in every mini-batch."""

    def largest(self, counts: list[int]) -> list[int]:
        return [max(count, 7) for count in counts]


def share() -> Batch:
    return batch(1, VOCAB, num_trajectories=3)


@pytest.fixture
def outlet(tmp_path: Path):
    outlet = Outlet(owner=ShmOwner(tmp_path / "rank-0.sock"), cuts=1)
    yield outlet
    outlet.owner.close()


def test_rank_0_tells_the_others_before_it_starts(outlet: Outlet, tmp_path: Path):
    told: list[AnyCommand] = []
    rank = Rank(FakePolicy(VOCAB), Alone(), SETTINGS, outlet, told.append)
    rank.train(MESSAGE, share(), lr=0.5)
    manifest = rank.export(1)
    assert manifest and [entry.name for entry in manifest.tensors] == ["table.weight"]
    rank.score([1, 2, 3])
    (tmp_path / "policy").mkdir()
    rank.save(tmp_path)
    rank.save_weights(tmp_path)
    rank.trim()
    assert told == [
        Train(batch=MESSAGE, lr=0.5),
        Export(policy_version=1),
        Score(tokens=[1, 2, 3]),
        Save(directory=str(tmp_path)),
        SaveWeights(directory=str(tmp_path)),
        Trim(),
    ]


def test_a_rank_whose_disk_fails_is_named_when_all_are_done(outlet: Outlet, tmp_path: Path):
    (tmp_path / "policy").mkdir()

    class FailingPeer(Alone):
        """Rank 2 of three has a full disk."""

        def collect(self, payload: bytes) -> list[bytes]:
            return [payload, payload, payload + b"No space left on device"]

    with pytest.raises(NotSaved, match=r"^rank 2: No space left on device$"):
        Rank(FakePolicy(VOCAB), FailingPeer(), SETTINGS, outlet).save(tmp_path)
    with pytest.raises(NotSaved, match="nowhere"):
        Rank(FakePolicy(VOCAB), Alone(), SETTINGS, outlet).save(tmp_path / "nowhere")


def test_micro_batches_of_padding_change_nothing(outlet: Outlet):
    few, many = FakePolicy(VOCAB), FakePolicy(VOCAB)
    stats = Rank(few, Alone(), SETTINGS, outlet).train(MESSAGE, share(), lr=0.5)
    padded = Rank(many, BusyPeer(), SETTINGS, outlet).train(MESSAGE, share(), lr=0.5)
    torch.testing.assert_close(many.table_VV, few.table_VV, rtol=1e-12, atol=0)
    assert padded["policy/num_micro_batches"] == 14
    assert (stats["packing/waste"], padded["packing/waste"]) == (0, 8 / (padded["tokens/trained"] + 8))
    for name in stats.keys() - {"policy/num_micro_batches", "packing/waste"}:
        if not name.startswith("timing/"):
            assert padded[name] == pytest.approx(stats[name]), name


def test_progress_counts_the_passes_of_the_step_under_way(outlet: Outlet, is_documented: Callable[[str], bool]):
    seen: list[tuple[float, float]] = []

    class Watched(FakePolicy):
        def optimizer_step(self, lr: float) -> float:
            gauges = rank.progress.gauges()
            assert all(is_documented(name) for name in gauges)
            assert gauges["progress/train_tokens"] == sum(len(t.tokens) for part in parts for t in part.trajectories)
            seen.append((gauges["progress/micro_batches_done"], gauges["progress/micro_batches"]))
            return super().optimizer_step(lr)

    rank = Rank(Watched(VOCAB), BusyPeer(), SETTINGS, outlet)
    parts = share().mini_batches
    for _ in range(2):
        rank.train(MESSAGE, share(), lr=0.5)
        assert set(rank.progress.gauges().values()) == {0.0}
    # 7 micro-batches a mini-batch: the second's are read first, then each is trained.
    assert seen == [(14, 21), (21, 21)] * 2


def test_code_of_the_user_s_own_that_cannot_be_trained_with_is_the_configuration_s_fault(outlet: Outlet):
    def nothing(*_: object) -> None: ...

    settings = StepSettings(loss=PolicyLoss(surrogate=checked_loss("mine:nothing", nothing)), max_tokens=64)
    with pytest.raises(ConfigError, match=r"step 1: algorithm\.loss=mine:nothing returned a NoneType"):
        Rank(FakePolicy(VOCAB), Alone(), settings, outlet).train(MESSAGE, share(), lr=0.5)


@pytest.mark.parametrize(
    ("threads", "parallel", "expected"),
    [(5, ParallelSection(tensor=2), 2), (2, ParallelSection(data=2, pipeline=2), 1), (6, ParallelSection(), 6)],
)
def test_ranks_share_the_threads(threads: int, parallel: ParallelSection, expected: int):
    assert num_threads(RunConfig(trainer=TrainerSection(threads=threads, parallel=parallel))) == expected


async def test_commands_arrive_as_they_were_sent():
    stream = asyncio.StreamReader()
    sent = [Join(port=4242), Train(batch=MESSAGE, lr=1e-3), Trim()]
    content = b"".join(commands.encode(command) for command in sent)
    for part in (content[:3], content[3:20], content[20:]):
        stream.feed_data(part)
    stream.feed_eof()
    assert [await commands.read(stream) for _ in sent] == sent
    assert await commands.read(stream) is None


async def test_a_pipe_cut_short_is_its_end_and_an_unknown_command_is_refused():
    cut, unknown = asyncio.StreamReader(), asyncio.StreamReader()
    cut.feed_data(commands.encode(Join(port=1))[:-1])
    cut.feed_eof()
    assert await commands.read(cut) is None
    payload = msgspec.msgpack.encode({"type": "Reboot"})
    unknown.feed_data(len(payload).to_bytes(4, "little") + payload)
    with pytest.raises(msgspec.ValidationError, match="Reboot"):
        await commands.read(unknown)
