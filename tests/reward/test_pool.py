"""Whatever a grader does, every text has one outcome, and nothing stays behind."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest

from beamline.protocol.errors import ConfigError
from beamline.reward.frames import MAX_TEXT_CHARS, Abstained, Job, encode_frame
from beamline.reward.grader import Verdict
from beamline.reward.grading_process import serve
from processes import is_running, wait_gone

RIGHT, WRONG = Verdict(reward=1.0, acc=1.0, pred="5"), Verdict(reward=-1.0, acc=0.0, pred="6")


async def test_outcomes_come_in_order(start_pool):
    pool = await start_pool("math_dapo")
    assert await pool.grade(["Answer: 5", "Answer: 6", "Answer: 5"], "5") == [RIGHT, WRONG, RIGHT]
    assert await pool.grade([], "5") == []


async def test_ten_thousand_a_minute(start_pool):
    pool = await start_pool("math_dapo", workers=2)
    started = time.monotonic()
    groups = await asyncio.gather(*(pool.grade(["work\n" * 50 + f"Answer: {i % 7}"] * 8, "5") for i in range(250)))
    assert sum(map(len, groups)) == 2000
    assert time.monotonic() - started < 12


async def test_ten_thousand_gradings_of_which_a_hundred_hang_and_a_hundred_crash(start_pool, planted):
    """Those two hundred abstain, each with its reason; all others have their verdict."""
    pool = await start_pool(planted, workers=32, grade_timeout_s=2.0)
    texts = [f"Answer: {5 + i % 2}" for i in range(10_000)]
    chosen = random.Random(0).sample(range(10_000), 200)
    trouble = {index: ("hang", "crash")[number % 2] for number, index in enumerate(chosen)}
    for index, name in trouble.items():
        texts[index] = name
    started = time.monotonic()
    groups = await asyncio.gather(*(pool.grade(texts[i : i + 8], "5") for i in range(0, 10_000, 8)))
    outcomes = [outcome for group in groups for outcome in group]
    assert len(outcomes) == 10_000
    abstained = {index: outcome.kind for index, outcome in enumerate(outcomes) if isinstance(outcome, Abstained)}
    assert abstained == {index: {"hang": "timeout", "crash": "crash"}[name] for index, name in trouble.items()}
    assert all(outcome == (RIGHT, WRONG)[i % 2] for i, outcome in enumerate(outcomes) if i not in trouble)
    assert time.monotonic() - started < 40


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [
        ("hang", "timeout", "no verdict within 1 s"),
        ("spin", "timeout", "no verdict within 1 s"),
        ("crash", "crash", "was ended by SIGABRT"),
        ("exit", "crash", "ended with status 7"),
        ("server", "crash", "was ended by SIGKILL"),
        ("memory", "memory", "grader raised MemoryError"),
        ("raise", "error", "grader raised LookupError: planted"),
        ("nan", "error", "reward=nan must be finite"),
        ("share", "error", "acc=2.0 must be in [0, 1]"),
        ("text", "error", "grader raised TypeError"),
        ("float", "error", "grader returned float, expected beamline.reward.grader.Verdict"),
        ("none", "error", "grader returned NoneType"),
    ],
)
async def test_trouble_abstains_and_says_why(start_pool, planted, text, kind, why):
    pool = await start_pool(planted, grade_timeout_s=1.0, memory_bytes=1 << 30)
    abstained, after = await pool.grade([text, "Answer: 5"], "5")
    assert isinstance(abstained, Abstained)
    assert abstained.kind == kind
    assert why in abstained.why
    assert after == RIGHT


async def test_a_verdict_of_other_types_of_number_is_a_verdict(start_pool, planted):
    pool = await start_pool(planted)
    assert await pool.grade(["number"], "5") == [RIGHT]


async def test_after_a_lack_of_memory_another_process_grades(start_pool, planted):
    pool = await start_pool(planted, memory_bytes=1 << 30)
    before, _, after = await pool.grade(["pid", "memory", "pid"], "")
    assert before.pred != after.pred


async def test_prints_and_long_answers_do_no_harm(start_pool, planted):
    pool = await start_pool(planted)
    printed, long, after = await pool.grade(["print", "long", "Answer: 5"], "5")
    assert printed.acc == 0.0
    assert len(long.pred) == MAX_TEXT_CHARS
    assert after == RIGHT


async def test_a_cancelled_group_leaves_nothing_to_the_next(start_pool, planted):
    pool = await start_pool(planted)
    grading = asyncio.create_task(pool.grade(["Answer: 6", "hang", "Answer: 6"], "5"))
    await asyncio.sleep(0.1)
    grading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await grading
    assert await pool.grade(["Answer: 5"], "5") == [RIGHT]


async def test_a_killed_grader_takes_its_children_along(start_pool, planted, tmp_path):
    pool = await start_pool(planted, grade_timeout_s=1.0)
    await pool.grade(["child"], str(tmp_path / "pid"))
    assert wait_gone(int((tmp_path / "pid").read_text()))


async def test_processes_are_kept_while_they_are_well_and_end_with_the_pool(start_pool, planted):
    pool = await start_pool(planted, workers=2)
    groups = await asyncio.gather(*(pool.grade(["pid"], "") for _ in range(10)))
    pids = {int(group[0].pred) for group in groups}
    assert len(pids) <= 2
    os.kill(min(pids), signal.SIGKILL)
    assert wait_gone(min(pids))
    await asyncio.gather(*(pool.grade(["Answer: 5"], "5") for _ in range(2)))
    await pool.close()
    assert not any(is_running(pid) for pid in pids)


async def test_the_graders_of_a_run_share_its_workers(start_graders, planted, tmp_path):
    """One worker: while one grader hangs the other waits; then each grades by its own rules."""
    graders = await start_graders("math_dapo", planted, workers=1, grade_timeout_s=1.0)
    assert graders.names == ["math_dapo", planted]
    hanging = asyncio.create_task(graders.grade(planted, ["hang"], ""))
    await asyncio.sleep(0)
    assert await graders.grade("math_dapo", ["Answer: 5"], "5") == [RIGHT]
    assert hanging.done()
    assert (await hanging)[0].kind == "timeout"


async def test_one_grader_that_cannot_be_loaded_stops_all(start_graders, planted):
    with pytest.raises(ConfigError, match="no_such_module"):
        await start_graders("math_dapo", "no_such_module:grade")


@pytest.mark.parametrize(
    ("grader", "words"),
    [
        ("no_such_module:grade", "No module named 'no_such_module'"),
        ("planted_graders:absent", "planted_graders has no function or class absent"),
        ("planted_broken:grade", "planted at import"),
        ("planted_exit:grade", "ended with status 3 while loading it"),
    ],
)
async def test_a_grader_that_cannot_be_loaded_is_refused_at_the_start(start_pool, planted, grader, words):
    with pytest.raises(ConfigError, match=words):
        await start_pool(grader)


ORPHAN = """
import asyncio
from beamline.protocol.reward_config import RewardSection
from beamline.reward.pool import GraderPool

async def main():
    settings = RewardSection(grade_timeout_s=600)
    pool = GraderPool("planted_graders:by_text", settings, asyncio.Semaphore(2))
    await pool.start()
    first, second = await asyncio.gather(pool.grade(["pid"], ""), pool.grade(["pid"], ""))
    print(first[0].pred, second[0].pred, flush=True)
    await pool.grade(["hang"], "")

asyncio.run(main())
"""


def test_grading_processes_die_with_a_service_that_is_killed(planted):
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        pids = [int(pid) for pid in service.stdout.readline().split()]
        service.kill()
    assert len(pids) == 2
    assert all(wait_gone(pid) for pid in pids)


def test_the_kernel_ends_a_grader_that_spins_for_nobody():
    """Even with no one to kill it: processor time is limited too."""

    def spin(text, ground_truth):
        while True:
            pass

    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        serve(theirs, spin, timeout_s=0.1, memory_bytes=1 << 32)
        os._exit(0)
    ours.sendall(encode_frame(Job(texts=["spin"], ground_truth="")))
    assert wait_gone(pid)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGXCPU
    ours.close()
    theirs.close()
