"""Groups of several turns on an engine without a model: what is sampled, what is observed, and what breaks."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from beamline.environments.host import EnvironmentPool
from beamline.models.chat import ChatTokenizer
from beamline.models.tokenizer import ASSETS
from beamline.protocol import messages as m
from beamline.protocol.blobs import RoutedExperts, Trajectories, VersionSpan, decode_blob
from beamline.protocol.environment_config import EnvironmentSection
from beamline.protocol.errors import ConfigError, Rejected
from beamline.rollout.fake_engine import FakeEngine, routes, token_logprob
from beamline.rollout.observations import Observations
from beamline.rollout.service import started_environments
from beamline.rollout.turns import Turns, turn_seed
from rollout_bench import SHAPE, Bench
from rollout_messages import prompt_group

PLANTED = "planted_environments:Planted"
PROMPT = [4, 5, 6]

type Respond = Callable[[m.PromptGroup, int], str]
type MakeTurns = Callable[..., Turns]


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer.load(ASSETS)


@pytest_asyncio.fixture
async def make_turns(chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MakeTurns]:
    """Turns on an engine that says what `respond` tells it; their processes end with the test."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    pools: list[EnvironmentPool] = []

    def make(name: str, respond: Respond, max_turns: int = 8, timeout_s: float = 10.0) -> Turns:
        pools.append(EnvironmentPool(name, num_workers=1, timeout_s=timeout_s, memory_bytes=1 << 30))
        engine = FakeEngine(respond=respond, shape=SHAPE)
        return Turns(engine, pools[-1], chat, template_kwargs={}, max_turns=max_turns)

    yield make
    await asyncio.gather(*(pool.close() for pool in pools))


def group_of(environment: str, seeds: list[int], *, max_tokens: int = 64, ground_truth: str = "") -> m.PromptGroup:
    group = prompt_group(PROMPT, seeds=seeds, max_tokens=max_tokens)
    task = msgspec.structs.replace(group.task, environment=environment, ground_truth=ground_truth)
    return msgspec.structs.replace(group, task=task)


def in_turns(*texts: str) -> Respond:
    """What a policy says that knows its turn by the seed, of samples with seeds below 100."""
    return lambda _group, seed: texts[next(t for t in range(99) for s in range(100) if turn_seed(s, t) == seed)]


async def test_a_tools_result_stands_between_two_turns(make_turns: MakeTurns, chat: ChatTokenizer) -> None:
    turns = make_turns("calculator", in_turns("7-2=and more", "Answer: 5"))
    (completion,) = await turns.generate(group_of("calculator", [1]))
    first, observed = len("7-2="), chat.encode("5\n")
    last = len(completion.tokens) - first - len(observed)
    assert completion.text == "7-2=5\nAnswer: 5"
    assert completion.tokens[first : first + len(observed)] == observed
    assert completion.loss_mask == [True] * first + [False] * len(observed) + [True] * last
    assert completion.logprobs == [
        token_logprob(token, 0) if sampled else 0.0
        for token, sampled in zip(completion.tokens, completion.loss_mask, strict=True)
    ]
    start = first + len(observed)
    assert completion.version_spans == [VersionSpan(0, 0, first), VersionSpan(0, start, start + last)]
    assert (completion.finish_reason, completion.environment_reward) == (m.FinishReason.STOP, 0.0)
    assert completion.routed_experts is not None
    assert np.array_equal(completion.routed_experts, routes([*PROMPT, *completion.tokens[:-1]], SHAPE))


async def test_a_group_without_an_environment_is_the_engines(make_turns: MakeTurns) -> None:
    turns = make_turns("calculator", in_turns("7-2="))
    (completion,) = await turns.generate(group_of("", [1]))
    assert completion.loss_mask is None and completion.environment_reward is None


async def test_rewards_are_summed_and_an_observation_before_the_first_turn_counts(
    make_turns: MakeTurns, chat: ChatTokenizer
) -> None:
    turns = make_turns(PLANTED, in_turns("a!", "b!", "done"))
    (completion,) = await turns.generate(group_of(PLANTED, [3], ground_truth="Go: "))
    assert completion.text == "Go: a!1b!2done"
    assert completion.environment_reward == 1.5
    assert completion.tokens[: len(chat.encode("Go: "))] == chat.encode("Go: ")
    assert completion.loss_mask is not None and sum(completion.loss_mask) < len(completion.tokens)


async def test_the_limits_of_turns_and_of_tokens_cut_a_trajectory_off(make_turns: MakeTurns) -> None:
    """Its last tokens are sampled ones: nobody reads the observation behind them."""
    turns = make_turns(PLANTED, in_turns(*["a!"] * 9), max_turns=2)
    (few_turns,) = await turns.generate(group_of(PLANTED, [1]))
    assert (few_turns.text, few_turns.finish_reason) == ("a!1a!", m.FinishReason.LENGTH)
    assert few_turns.environment_reward == 1.0
    turns = make_turns(PLANTED, in_turns(*["a!"] * 9))
    (few_tokens,) = await turns.generate(group_of(PLANTED, [1], max_tokens=6))
    assert (few_tokens.text, few_tokens.finish_reason) == ("a!1a!", m.FinishReason.LENGTH)
    assert few_tokens.loss_mask == [True, True, False, True, True]


@pytest.mark.parametrize(("text", "why"), [("raise", "raised LookupError: planted"), ("hang", "within 0.5 s")])
async def test_what_breaks_is_one_trajectory_and_the_group_goes_on(
    make_turns: MakeTurns, caplog: pytest.LogCaptureFixture, text: str, why: str
) -> None:
    bad, good = 1, 2
    turns = make_turns(
        PLANTED,
        lambda group, seed: "a!" if seed in (bad, good) else {turn_seed(bad, 1): text}.get(seed, "done"),
        timeout_s=0.5,
    )
    with caplog.at_level(logging.WARNING):
        broken, whole = await turns.generate(group_of(PLANTED, [bad, good]))
    assert (whole.text, whole.finish_reason) == ("a!1done", m.FinishReason.STOP)
    assert (broken.text, broken.finish_reason) == (f"a!1{text}", m.FinishReason.ENVIRONMENT)
    assert f"environment {PLANTED} of group g-000001, sample 0, turn 2: " in caplog.text
    assert why in caplog.text


async def test_a_group_of_which_nothing_ends_is_refused_by_the_cause(make_turns: MakeTurns) -> None:
    turns = make_turns(PLANTED, in_turns("a!"))
    words = f"environment {PLANTED} of group g-000001, sample 0, turn 0: raised LookupError: planted; no sample"
    with pytest.raises(Rejected, match=words) as rejected:
        await turns.generate(group_of(PLANTED, [1, 2], ground_truth="raise"))
    assert rejected.value.kind == "environment"
    with pytest.raises(Rejected, match="its first observation has 70 tokens, a response at most 64"):
        await turns.generate(group_of(PLANTED, [1], ground_truth="7" * 70))


async def test_another_environment_than_the_runs_is_refused(make_turns: MakeTurns) -> None:
    turns = make_turns("calculator", in_turns("7-2="))
    with pytest.raises(Rejected, match="asks for environment 'planted', this run's is 'calculator'"):
        await turns.generate(group_of("planted", [1]))


async def test_a_run_whose_environment_cannot_be_loaded_does_not_start() -> None:
    with pytest.raises(ConfigError, match="name=no_such_module:Game: no_such_module cannot be"):
        async with started_environments(EnvironmentSection(name="no_such_module:Game")):
            pass
    async with started_environments(EnvironmentSection()) as none:
        assert none is None


async def test_a_trajectory_that_waits_for_its_environment_is_aborted_in_time(make_turns: MakeTurns) -> None:
    turns = make_turns(PLANTED, in_turns("a!", "hang"), timeout_s=60.0)
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, stop.set)
    async with asyncio.timeout(10):
        (completion,) = await turns.generate(group_of(PLANTED, [1]), stop)
    assert (completion.text, completion.finish_reason) == ("a!1hang", m.FinishReason.ABORT)


def test_each_turn_has_a_seed_of_its_own_and_the_first_is_the_samples() -> None:
    assert turn_seed(7, 0) == 7
    seeds = {turn_seed(seed, turn) for seed in range(10) for turn in range(10)}
    assert len(seeds) == 100 and all(0 <= seed < 2**31 for seed in seeds)


async def test_the_worker_sends_masks_routes_and_rewards(make_turns: MakeTurns, tmp_path: Path) -> None:
    turns = make_turns(PLANTED, in_turns("a!", "done"))
    bench = Bench(FakeEngine(shape=SHAPE), tmp_path, shape=SHAPE, sampler=turns)
    await bench.update(0)
    answer = await bench.worker.handle(group_of(PLANTED, [1, 2]))
    assert isinstance(answer, m.TrajectoryGroup) and answer.routed_experts is not None
    blob = decode_blob(Trajectories, await bench.blobs.get(answer.trajectories))
    routed = decode_blob(RoutedExperts, await bench.blobs.get(answer.routed_experts))
    assert blob.texts == ["a!1done", "a!1done"] and blob.environment_rewards == [1.0, 1.0]
    assert list(blob.loss_mask[:4]) == [1, 1, 0, 1]
    lengths = np.diff(np.frombuffer(blob.cu_seqlens, np.int32))
    assert lengths.tolist() == answer.response_lengths
    rows = np.diff(np.frombuffer(routed.cu_seqlens, np.int32))
    assert rows.tolist() == [len(PROMPT) + length - 1 for length in answer.response_lengths]


async def test_an_observation_becomes_a_message_of_the_chat(chat: ChatTokenizer, make_turns: MakeTurns) -> None:
    """The tokens between two turns are those that the template writes for the whole chat."""
    turns = make_turns("planted_environments:Messages", in_turns("a", "done"))
    (completion,) = await turns.generate(group_of("planted_environments:Messages", [1], max_tokens=400))
    assert completion.loss_mask is not None
    observed = [t for t, sampled in zip(completion.tokens, completion.loss_mask, strict=True) if not sampled]
    assert completion.tokens[completion.loss_mask.index(False) - 1] in chat.eos_token_ids
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]
    whole = chat.encode_chat([*messages, {"role": "user", "content": "1"}])
    assert whole == chat.encode_chat(messages, add_generation_prompt=False)[:-1] + observed


def test_the_policys_message_is_ended_for_it_where_a_stop_text_ended_its_turn(chat: ChatTokenizer) -> None:
    observations = Observations(chat, "tool", {"reasoning_effort": "high"})
    (end,) = chat.eos_token_ids
    (cut_off, text), (ended, _) = observations.after([5], "ok"), observations.after([5, end], "ok")
    assert cut_off == [end, *ended]
    assert text == "\ntool\nok\nassistant\n"


def test_an_observation_without_a_role_is_its_text_alone(chat: ChatTokenizer) -> None:
    assert Observations(chat, "", {}).after([5], "5\n") == (chat.encode("5\n"), "5\n")
