"""Whatever a grader does, every text has one outcome, and nothing stays behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from beamline.protocol.errors import ConfigError
from beamline.reward.frames import MAX_TEXT_CHARS, Abstained, Job, encode_frame
from beamline.reward.grader import Verdict, import_path
from beamline.reward.pool import GraderPool
from processes import is_running, wait_gone

RIGHT, WRONG = Verdict(reward=1.0, acc=1.0, pred="5"), Verdict(reward=-1.0, acc=0.0, pred="6")


async def test_outcomes_come_in_order(start_pool):
    pool = await start_pool("math_dapo")
    assert await pool.grade(["Answer: 5", "Answer: 6", "Answer: 5"], "5") == [RIGHT, WRONG, RIGHT]
    assert await pool.grade([], "5") == []


async def test_ten_thousand_a_minute(start_pool):
    pool = await start_pool("math_dapo", num_workers=2)
    started = time.monotonic()
    groups = await asyncio.gather(*(pool.grade(["work\n" * 50 + f"Answer: {i % 7}"] * 8, "5") for i in range(250)))
    assert sum(map(len, groups)) == 2000
    assert time.monotonic() - started < 12


async def test_nothing_is_lost_among_graders_that_hang_and_crash(start_pool, planted):
    """300 gradings of which 5 hang and 5 crash: those ten abstain, all others have their verdict."""
    pool = await start_pool(planted, num_workers=2, timeout_s=2.0)
    texts = [f"Answer: {5 + i % 2}" for i in range(300)]
    planted_at = {3: "hang", 4: "crash", 64: "hang", 100: "crash", 101: "hang", 150: "exit", 199: "hang", 208: "crash"}
    planted_at |= {250: "hang", 299: "crash"}
    for index, trouble in planted_at.items():
        texts[index] = trouble
    groups = await asyncio.gather(*(pool.grade(texts[i : i + 8], "5") for i in range(0, 300, 8)))
    outcomes = [outcome for group in groups for outcome in group]
    assert len(outcomes) == 300
    for index, outcome in enumerate(outcomes):
        if index in planted_at:
            assert isinstance(outcome, Abstained), texts[index]
        else:
            assert outcome == (RIGHT, WRONG)[index % 2]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hang", "no verdict within 1 s"),
        ("spin", "no verdict within 1 s"),
        ("crash", "was ended by SIGABRT"),
        ("exit", "ended with status 7"),
        ("raise", "grader raised LookupError: planted"),
        ("memory", "grader raised MemoryError"),
        ("nan", "must be finite"),
        ("float", "grader returned float"),
    ],
)
async def test_trouble_abstains_and_says_why(start_pool, planted, text, why):
    pool = await start_pool(planted, timeout_s=1.0, memory_bytes=1 << 30)
    abstained, after = await pool.grade([text, "Answer: 5"], "5")
    assert isinstance(abstained, Abstained)
    assert why in abstained.why
    assert after == RIGHT


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
    pool = await start_pool(planted, timeout_s=1.0)
    await pool.grade(["child"], str(tmp_path / "pid"))
    assert wait_gone(int((tmp_path / "pid").read_text()))


async def test_processes_are_kept_while_they_are_well_and_end_with_the_pool(start_pool, planted):
    pool = await start_pool(planted, num_workers=2)
    pids = {process.pid for process in pool.processes}
    graded = [(await pool.grade(["pid"], ""))[0].pred for _ in range(6)]
    assert set(map(int, graded)) == pids
    await pool.close()
    assert not any(is_running(pid) for pid in pids)


def test_an_unknown_grader_is_refused_by_its_nearest_name():
    with pytest.raises(ConfigError, match="'math_dappo' is not a grader: did you mean 'math_dapo'"):
        GraderPool("math_dappo", num_workers=1, timeout_s=1.0)
    assert import_path("my.package:function") == "my.package:function"


@pytest.mark.parametrize(
    ("grader", "words"),
    [
        ("no_such_module:grade", "No module named 'no_such_module'"),
        ("planted_graders:absent", "has no attribute 'absent'"),
        ("planted_broken:grade", "ended with status 1 while loading it"),
    ],
)
async def test_a_grader_that_cannot_be_loaded_is_refused_at_the_start(planted, grader, words):
    pool = GraderPool(grader, num_workers=2, timeout_s=1.0)
    with pytest.raises(ConfigError, match=words):
        await pool.start()
    assert [process.pid for process in pool.processes] == [None, None]


ORPHAN = """
import asyncio
from beamline.reward.pool import GraderPool

async def main():
    pool = GraderPool("planted_graders:by_text", num_workers=2, timeout_s=600)
    await pool.start()
    print(*(process.pid for process in pool.processes), flush=True)
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


def test_the_kernel_ends_a_grader_that_spins_for_nobody(planted):
    """Even with no one to kill it: processor time is limited too."""
    command = [sys.executable, "-m", "beamline.reward.grading_process", f"--grader={planted}"]
    command += ["--timeout-s=0.1", f"--memory-bytes={1 << 30}", f"--parent={os.getpid()}"]
    folder = Path(__file__).parent
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=folder) as process:
        assert process.stdin is not None
        process.stdin.write(encode_frame(Job(texts=["spin"], ground_truth="")))
        process.stdin.flush()
        assert process.wait(timeout=60) == -signal.SIGXCPU
