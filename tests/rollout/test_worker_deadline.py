"""A group whose time runs out: what ended goes out beside what was aborted; only a group without an end has failed."""

import asyncio
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import pytest

from beamline.protocol import messages as m
from beamline.protocol.blobs import RoutedExperts, Trajectories, VersionSpan, decode_blob
from beamline.rollout.fake_engine import FakeEngine, routes, token_logprob
from rollout_bench import SHAPE, Bench
from rollout_messages import prompt_group

PROMPT = [4, 5, 6]
SEEDS = [1, 2, 3, 4]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


class Turns:
    """Lets an engine sample the tokens of some turns, counted over all samples, and none of the others, ever."""

    def __init__(self, granted: Callable[[int], bool]) -> None:
        self._granted = granted
        self._numbers = count()

    def wait(self) -> asyncio.Future[None]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._granted(next(self._numbers)):
            turn.set_result(None)
        return turn


def columns(blob: Trajectories, sample: int) -> tuple[list[int], np.ndarray]:
    """Tokens and log-probabilities of one trajectory."""
    start, end = np.frombuffer(blob.cu_seqlens, np.int32)[sample : sample + 2]
    tokens, logprobs = np.frombuffer(blob.tokens, np.int32), np.frombuffer(blob.rollout_logprobs, np.float32)
    return tokens[start:end].tolist(), logprobs[start:end]


async def whole_group(folder: Path) -> tuple[m.PromptGroup, m.TrajectoryGroup, Trajectories]:
    """The group, and its samples when it has all the time."""
    bench = Bench(FakeEngine(shape=SHAPE), folder, shape=SHAPE)
    await bench.update(0)
    group = prompt_group(PROMPT, seeds=SEEDS, max_tokens=64)
    answer = await bench.worker.handle(group)
    assert isinstance(answer, m.TrajectoryGroup)
    return group, answer, decode_blob(Trajectories, await bench.blobs.get(answer.trajectories))


async def test_samples_that_ran_out_of_time_go_out_with_all_that_they_have(folder: Path):
    group, whole, whole_blob = await whole_group(folder)
    shortest = min(whole.response_lengths)
    turns = Turns(lambda number: number < len(SEEDS) * shortest)
    bench = Bench(FakeEngine(wait=turns.wait, shape=SHAPE), folder, shape=SHAPE)
    await bench.update(0)
    answer = await bench.worker.handle(msgspec.structs.replace(group, deadline=time.time() + 0.3))
    assert isinstance(answer, m.TrajectoryGroup) and answer.routed_experts is not None
    aborted = [reason is m.FinishReason.ABORT for reason in answer.finish_reasons]
    assert aborted == [length > shortest for length in whole.response_lengths] and sum(aborted) == len(SEEDS) - 1
    assert answer.response_lengths == [shortest] * len(SEEDS)
    blob = decode_blob(Trajectories, await bench.blobs.get(answer.trajectories))
    routed = decode_blob(RoutedExperts, await bench.blobs.get(answer.routed_experts))
    ids_RLK = np.frombuffer(routed.ids, np.uint8).reshape(-1, SHAPE.num_layers, SHAPE.top_k)
    for sample, rows_RLK in enumerate(np.split(ids_RLK, np.frombuffer(routed.cu_seqlens, np.int32)[1:-1])):
        tokens, logprobs = columns(blob, sample)
        assert tokens == columns(whole_blob, sample)[0][:shortest]
        assert np.array_equal(logprobs, np.array([token_logprob(token, 0) for token in tokens], np.float32))
        assert blob.version_spans[sample] == [VersionSpan(0, 0, shortest)]
        assert np.array_equal(rows_RLK, routes([*PROMPT, *tokens[:-1]], SHAPE))


async def test_a_sample_that_never_began_has_no_rows_and_shapes_hold(folder: Path):
    group, whole, _ = await whole_group(folder)
    turns = Turns(lambda number: number == 0 or number >= len(SEEDS))  # after the first round only the first goes on
    bench = Bench(FakeEngine(wait=turns.wait, shape=SHAPE), folder, shape=SHAPE)
    await bench.update(0)
    answer = await bench.worker.handle(msgspec.structs.replace(group, deadline=time.time() + 0.1))
    assert isinstance(answer, m.TrajectoryGroup) and answer.routed_experts is not None
    assert answer.response_lengths == [whole.response_lengths[0], 0, 0, 0]
    blob = decode_blob(Trajectories, await bench.blobs.get(answer.trajectories))
    assert blob.version_spans[1:] == [[], [], []] and blob.texts[1:] == ["", "", ""]
    routed = decode_blob(RoutedExperts, await bench.blobs.get(answer.routed_experts))
    assert np.diff(np.frombuffer(routed.cu_seqlens, np.int32)).tolist() == [2 + whole.response_lengths[0], 0, 0, 0]


@pytest.mark.parametrize("num_tokens", [0, 2], ids=["nothing sampled", "tokens but no end"])
async def test_a_group_without_one_finished_sample_fails_and_may_be_tried_again(folder: Path, num_tokens: int):
    group, whole, _ = await whole_group(folder)
    assert min(whole.response_lengths) > num_tokens
    bench = Bench(FakeEngine(wait=Turns(lambda number: number < num_tokens).wait), folder)
    await bench.update(0)
    answer = await bench.worker.handle(msgspec.structs.replace(group, deadline=time.time() + 0.1))
    assert isinstance(answer, m.GroupFailed)
    assert (answer.kind, answer.retryable, answer.service) == ("deadline", True, "rollout")
    assert bench.status.in_flight == 0


async def test_a_group_that_is_taken_too_late_fails_without_being_sampled(folder: Path):
    group, _, _ = await whole_group(folder)
    bench = Bench(FakeEngine(), folder, answer_s=5.0)
    await bench.update(0)
    answer = await bench.worker.handle(msgspec.structs.replace(group, deadline=time.time() + 4.0))
    assert isinstance(answer, m.GroupFailed) and answer.kind == "deadline"


async def test_samples_are_aborted_while_memory_is_released(folder: Path):
    group, _, _ = await whole_group(folder)
    bench = Bench(FakeEngine(), folder)
    await bench.update(0)
    await bench.engine.release_memory()
    answer = await bench.worker.handle(msgspec.structs.replace(group, deadline=time.time() + 0.1))
    assert isinstance(answer, m.GroupFailed) and answer.kind == "deadline"


async def test_a_worker_that_is_stopped_drops_its_samples_at_once(folder: Path):
    group, _, _ = await whole_group(folder)
    bench = Bench(FakeEngine(wait=Turns(lambda number: number < 2).wait), folder)
    await bench.update(0)
    sampling = asyncio.create_task(bench.worker.handle(group))
    await asyncio.sleep(0)
    sampling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sampling
    assert bench.status.in_flight == 0
