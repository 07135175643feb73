"""The service as it is started: a process on a real nats-server, with trajectories in shared memory."""

import asyncio
import signal
import sys
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from beamline.protocol import messages as m
from beamline.protocol.config import DataSection, EvalSet, RunConfig, RunSection
from beamline.protocol.reward_config import RewardSection
from beamline.protocol.subjects import Subjects
from beamline.runtime.nats_bus import NatsBus
from beamline.runtime.nats_server import NatsServer
from beamline.runtime.run_files import write_config
from beamline.runtime.shm_blobs import ShmBlobStore, shm_root, sweep
from group_messages import group_of
from processes import wait_gone

SUBJECTS = Subjects(prefix="beamline", run="reward-test")


class Ring:
    """The other side of the bus, and the services under test."""

    def __init__(self, run_dir: Path, server: NatsServer, coordinator: NatsBus, rollout: NatsBus) -> None:
        self.run_dir, self.server, self.coordinator, self.rollout = run_dir, server, coordinator, rollout
        self.blobs = ShmBlobStore(shm_root(SUBJECTS, run_dir))
        self.processes: list[asyncio.subprocess.Process] = []
        self.answers: asyncio.Queue[m.Message] = asyncio.Queue()
        self.collecting = asyncio.create_task(coordinator.work("coordinator", self._collect))

    async def _collect(self, message: m.Message) -> None:
        self.answers.put_nowait(message)

    async def start_reward(self, evals: list[EvalSet] | None = None, **settings: object) -> asyncio.subprocess.Process:
        section = msgspec.convert({"workers": 2, **settings}, RewardSection)
        run, data = RunSection(name=SUBJECTS.run), DataSection(evals=evals or [])
        write_config(self.run_dir, RunConfig(run=run, data=data, reward=section))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "beamline.reward", "--run-dir", str(self.run_dir), "--worker", "reward-0"),
            stderr=asyncio.subprocess.PIPE,
        )
        self.processes.append(process)
        return process

    async def ask(self, group_id: str, texts: list[str], grader: str = "math_dapo") -> None:
        await self.rollout.publish(await group_of(self.blobs, texts, group_id=group_id, grader=grader))

    async def answer(self) -> m.Message:
        async with asyncio.timeout(30):
            return await self.answers.get()


@pytest_asyncio.fixture
async def ring(tmp_path: Path):
    server = NatsServer(tmp_path, SUBJECTS)
    await server.start()
    coordinator = await NatsBus.connect(server.credentials("coordinator"), SUBJECTS, name="coordinator", ack_wait_s=1.0)
    await coordinator.ensure_streams()
    rollout = await NatsBus.connect(server.credentials("rollout"), SUBJECTS, name="rollout", ack_wait_s=1.0)
    ring = Ring(tmp_path, server, coordinator, rollout)
    yield ring
    for process in ring.processes:
        if process.returncode is None:
            process.kill()
            await process.wait()
    ring.collecting.cancel()
    await asyncio.gather(ring.collecting, return_exceptions=True)
    await coordinator.close()
    await rollout.close()
    await server.stop()
    sweep(SUBJECTS, tmp_path)


def children_of(pid: int) -> list[int]:
    """And theirs."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [below for child in children for below in children_of(child)]


async def test_groups_are_scored_until_it_is_asked_to_drain(ring):
    process = await ring.start_reward()
    await ring.ask("g-1", ["Answer: 5", "Answer: 6"])
    scored = await ring.answer()
    assert isinstance(scored, m.ScoredGroup)
    assert [grade.reward for grade in scored.grades] == [1.0, -1.0]
    await ring.ask("g-2", ["Answer: 5"], grader="math_verify")
    failed = await ring.answer()
    assert isinstance(failed, m.GroupFailed)
    assert (failed.group_id, failed.kind) == ("g-2", "grader")
    graders = children_of(process.pid)
    process.send_signal(signal.SIGTERM)
    _, log = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, log.decode()
    assert len(graders) == 2, "the fork server and the process that graded"
    assert all(wait_gone(pid) for pid in graders)


async def test_a_group_that_was_being_graded_when_the_service_was_killed_is_scored_by_the_next(ring, planted):
    first = await ring.start_reward(grader=planted, grade_timeout_s=600.0)
    await ring.ask("g-1", ["Answer: 5"], grader=planted)
    await ring.answer()
    await ring.ask("g-2", ["hang", "Answer: 5"], grader=planted)
    await ring.ask("g-3", ["Answer: 5"], grader=planted)
    assert (await ring.answer()).group_id == "g-3"
    graders = children_of(first.pid)
    first.kill()
    await first.wait()
    assert all(wait_gone(pid) for pid in graders)
    await ring.start_reward(grader=planted, grade_timeout_s=0.5)
    scored = await ring.answer()
    assert scored.group_id == "g-2"
    assert [grade.reward for grade in scored.grades] == [None, 1.0]


async def test_a_grader_that_cannot_be_loaded_is_a_plain_message_and_exit_code_2(ring):
    process = await ring.start_reward(grader="no_such_module:grade")
    _, log = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2
    last = log.decode().strip().splitlines()[-1]
    assert last.startswith("error: grader no_such_module:grade cannot be loaded:")
    assert "Traceback" not in log.decode()


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("$.reward", {"reward": {"grader": "math_dappo"}}),
        ("$.data.evals[0]", {"data": {"evals": [{"path": "rows.parquet", "grader": "math_dappo"}]}}),
    ],
)
def test_an_unknown_grader_is_refused_by_its_nearest_name(key, settings):
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert(settings, RunConfig)
    assert "grader='math_dappo' does not exist: did you mean 'math_dapo'" in str(error.value)
    assert key in str(error.value)


def test_the_graders_of_a_run_are_those_of_training_and_of_its_evaluations():
    evals = [EvalSet(path="a"), EvalSet(path="b", grader="exact"), EvalSet(path="c", grader="my.package:grade")]
    config = RunConfig(reward=RewardSection(grader="gsm8k"), data=DataSection(evals=evals))
    assert config.graders == ["gsm8k", "exact", "my.package:grade"]


async def test_groups_are_graded_as_each_asks(ring):
    """Training by one grader, an evaluation by another."""
    await ring.start_reward(evals=[EvalSet(path="rows.parquet", grader="exact")])
    for grader, rewards in [("math_dapo", [1.0, 1.0]), ("exact", [1.0, -1.0])]:
        await ring.ask(f"g-{grader}", ["Answer: 5", "Answer: $5$"], grader=grader)
        scored = await ring.answer()
        assert [grade.reward for grade in scored.grades] == rewards, grader
