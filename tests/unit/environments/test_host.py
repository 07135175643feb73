"""Whatever an environment does, it is its own trajectory that ends, and nothing stays behind."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from beamline.environments.environment import ENVIRONMENTS, EpisodeTask, Start, Step
from beamline.environments.host import EnvironmentFailed, EnvironmentPool
from beamline.protocol import environment_config
from beamline.protocol.errors import ConfigError
from processes import is_running, wait_gone

PLANTED = "planted_environments:Planted"
MEMORY_BYTES = 1 << 30

type MakePool = Callable[..., EnvironmentPool]


def task(ground_truth: str = "") -> EpisodeTask:
    return EpisodeTask(prompt_id="p", data_source="d", prompt="", ground_truth=ground_truth, seed=1)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support"))


@pytest_asyncio.fixture
async def make_pool() -> AsyncIterator[MakePool]:
    """Pools that end with the test."""
    pools: list[EnvironmentPool] = []

    def make(name: str = PLANTED, num_workers: int = 1, timeout_s: float = 10.0) -> EnvironmentPool:
        pools.append(EnvironmentPool(name, num_workers=num_workers, timeout_s=timeout_s, memory_bytes=MEMORY_BYTES))
        return pools[-1]

    yield make
    await asyncio.gather(*(pool.close() for pool in pools))


async def test_episodes_of_one_process_are_apart(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.episode(task("a")) as first, pool.episode(task("b")) as second:
        assert await first.reset() == Start(observation="a", stop=["!"])
        assert await second.reset() == Start(observation="b", stop=["!"])
        assert await first.step("x") == Step(observation="1", reward=0.5)
        assert await first.step("x") == Step(observation="2", reward=0.5)
        assert await second.step("done") == Step(observation="1", reward=0.5, done=True)


async def test_the_calculator_answers(make_pool: MakePool) -> None:
    pool = make_pool("calculator")
    with pool.episode(task()) as episode:
        assert await episode.reset() == Start(stop=["="])
        assert await episode.step("7-2=") == Step(observation="5\n")
        assert await episode.step("Answer: 5") == Step(done=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise", "raised LookupError: planted"),
        ("hang", "did not answer within 1 s"),
        ("spin", "did not answer within 1 s"),
        ("crash", "took its process down, which was ended by SIGABRT"),
        ("exit", "took its process down, which ended with status 7"),
        ("memory", "raised MemoryError"),
        ("none", "step returned NoneType, expected beamline.environments.environment.Step"),
        ("start", "step returned Start, expected beamline.environments.environment.Step"),
        ("number", "step returned what is no answer: Expected `str`, got `int`"),
        ("function", "returned what cannot be sent: Encoding objects of type builtin_function"),
        ("nan", "raised ValueError: reward=nan must be finite"),
        ("long", "at most 1048576"),
    ],
)
async def test_trouble_ends_its_own_episode_and_says_why(make_pool: MakePool, text: str, why: str) -> None:
    """The other one goes on where it was, in another process if need be."""
    pool = make_pool(timeout_s=1.0)
    with pool.episode(task()) as bad, pool.episode(task()) as good:
        await bad.reset()
        await good.reset()
        assert (await good.step("x")).observation == "1"
        with pytest.raises(EnvironmentFailed, match=why):
            await bad.step(text)
        assert (await good.step("x")).observation == "2"


async def test_a_reset_that_raises_says_so(make_pool: MakePool) -> None:
    with make_pool().episode(task("raise")) as episode, pytest.raises(EnvironmentFailed, match="LookupError: planted"):
        await episode.reset()


async def test_an_environment_that_needs_arguments_says_so(make_pool: MakePool) -> None:
    pool = make_pool("planted_environments:Broken")
    with pool.episode(task()) as episode, pytest.raises(EnvironmentFailed, match="raised TypeError"):
        await episode.reset()


async def test_prints_do_no_harm(make_pool: MakePool) -> None:
    with make_pool().episode(task()) as episode:
        await episode.reset()
        assert (await episode.step("print")).observation == "1"


async def test_one_that_answers_otherwise_when_it_is_made_again_is_found_out(make_pool: MakePool) -> None:
    pool = make_pool("planted_environments:Forgetful", timeout_s=1.0)
    with pool.episode(task()) as forgetful, pool.episode(task()) as bad:
        await forgetful.reset()
        await forgetful.step("x")
        await bad.reset()
        with pytest.raises(EnvironmentFailed, match="within 1 s"):
            await bad.step("hang")
        with pytest.raises(EnvironmentFailed, match="is not deterministic"):
            await forgetful.step("x")


async def test_a_cancelled_call_leaves_nothing_to_the_next(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.episode(task()) as hanging, pool.episode(task()) as waiting:
        await waiting.reset()
        await hanging.reset()
        call = asyncio.create_task(hanging.step("hang"))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await waiting.step("x")).observation == "1"


async def test_workers_share_the_episodes_and_end_with_the_pool(make_pool: MakePool) -> None:
    pool = make_pool(num_workers=2)
    await pool.start()
    pids = {host.pid for host in pool.hosts}
    answered: set[int] = set()
    for _ in range(4):
        with pool.episode(task()) as episode:
            await episode.reset()
            answered.add(int((await episode.step("pid")).observation))
    assert answered == pids and len(pids) == 2
    await pool.close()
    assert not any(is_running(pid) for pid in answered)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:Game", "rollout.environment.name=no_such_module:Game: no_such_module cannot be imported"),
        ("planted_environments:Absent", "planted_environments has no function or class Absent"),
    ],
)
async def test_an_environment_that_cannot_be_loaded_is_refused_at_the_start(
    make_pool: MakePool, name: str, words: str
) -> None:
    pool = make_pool(name, num_workers=2)
    with pytest.raises(ConfigError, match=words):
        await pool.start()
    assert [host.pid for host in pool.hosts] == [None, None]


def test_the_recipe_knows_the_same_names() -> None:
    assert sorted(ENVIRONMENTS) == sorted(environment_config.ENVIRONMENTS)


async def test_the_worked_example_plays(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    with make_pool("examples.number_game:NumberGame").episode(task("37")) as game:
        assert await game.reset() == Start(role="user")
        assert await game.step("well") == Step(observation="Write a number.")
        assert await game.step("Is it 20?") == Step(observation="It is higher.")
        assert await game.step("Is it 50?") == Step(observation="It is lower.")
        assert await game.step("37") == Step(reward=0.8, done=True)


def test_the_document_shows_the_worked_example() -> None:
    root = Path(__file__).parents[3]
    _, _, shown = (root / "docs" / "environments.md").read_text().partition("class NumberGame:")
    example = (root / "examples" / "number_game.py").read_text()
    lines = [line for line in shown.partition("```")[0].splitlines() if line.strip()]
    assert len(lines) > 10 and [line for line in lines if line not in example.splitlines()] == []


ORPHAN = """
import asyncio
from beamline.environments.environment import EpisodeTask
from beamline.environments.host import EnvironmentPool

async def main():
    pool = EnvironmentPool("planted_environments:Planted", num_workers=1, timeout_s=600, memory_bytes=1 << 30)
    await pool.start()
    print(pool.hosts[0].pid, flush=True)
    with pool.episode(EpisodeTask(prompt_id="", data_source="", prompt="", ground_truth="", seed=0)) as episode:
        await episode.reset()
        await episode.step("hang")

asyncio.run(main())
"""


def test_processes_die_with_a_service_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        pid = int(service.stdout.readline())
        service.send_signal(signal.SIGKILL)
    assert wait_gone(pid) and pid != os.getpid()
