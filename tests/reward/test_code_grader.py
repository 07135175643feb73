"""The grader `code`: verdicts on honest code, and what dishonest code cannot do."""

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from beamline.protocol.errors import ConfigError
from beamline.protocol.reward_config import CodeSection
from beamline.reward import landlock, seccomp
from beamline.reward.code_grader import CodeGrader, last_code_block
from beamline.reward.code_tests import read_tests, same_output
from beamline.reward.sandbox import Sandbox
from processes import wait_gone

LIMITS = CodeSection(cpu_s=1, wall_s=2.0, memory_mib=256, output_kib=64)
SQUARE = [{"stdin": "3\n", "stdout": "9\n"}, {"stdin": "4", "stdout": "16"}]
SPENT = "used more than 1 s of processor time|the completion has ended|ran out of time"
"""Of processor time or, on a busy machine, of time."""
ADD = ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"]


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(LIMITS)


@pytest.fixture
def grade(sandbox):
    def run(code, **tests):
        return CodeGrader(sandbox, wall_s=LIMITS.wall_s).grade(f"So:\n```python\n{code}\n```\n", json.dumps(tests))

    return run


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("print(int(input()) ** 2)", {"pairs": SQUARE}),
        ("import sys\nfor line in sys.stdin:\n    print(int(line) ** 2, '\\n')", {"pairs": SQUARE}),
        ("import asyncio\nasync def f():\n    print(9)\nasyncio.run(f())", {"pairs": SQUARE[:1]}),
        (
            "from threading import Thread\nt = Thread(target=print, args=(9,))\nt.start()\nt.join()",
            {"pairs": SQUARE[:1]},
        ),
        ("def add(a, b):\n    return a + b", {"asserts": ADD}),
        ("print('hello')\nadd = lambda a, b: a + b\nprint(add(1, 2))", {"asserts": ADD}),
        ("def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    raise SystemExit", {"asserts": ADD}),
        (
            "def add(a, b):\n    return a + b",
            {"asserts": ["import math", "def check(candidate):\n    assert candidate(b=1, a=2) == 3", "check(add)"]},
        ),
        (
            "def f():\n    return float('inf'), {1: {2}}, (n for n in 'ab'), set(), None, True, b'x', 'é\\n', 1j",
            {"asserts": ["assert f() == (float('inf'), {1: {2}}, ['a', 'b'], set(), None, True, b'x', 'é\\n', 1j)"]},
        ),
        (
            "def f(x):\n    raise ValueError('no')",
            {
                "asserts": [
                    "try:\n    f(1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'"
                ]
            },
        ),
        (
            "from collections import Counter, namedtuple\ndef f(s):\n    return Counter(s)",
            {"asserts": ["assert f('aa') == {'a': 2}"]},
        ),
    ],
)
def test_right_code_passes(grade, code, tests):
    verdict = grade(code, **tests)
    assert (verdict.reward, verdict.acc, verdict.pred, verdict.why) == (1.0, 1.0, "passed", "")


@pytest.mark.parametrize(
    ("code", "tests", "why"),
    [
        ("print(int(input()) + 6)", {"pairs": SQUARE}, "pair 1: printed '10\\n', expected '16'"),
        ("print(9)\nraise SystemExit(1)", {"pairs": SQUARE}, "pair 0: ended with status 1"),
        ("def add(a, b):\n    return a * b", {"asserts": ADD}, "line 1: AssertionError"),
        ("def sub(a, b):\n    return a - b", {"asserts": ADD}, "NameError"),
        ("syntax error", {"asserts": ADD}, "line 1"),
        ("while True:\n    pass", {"pairs": SQUARE}, SPENT),
        ("def add(a, b):\n    while True:\n        pass", {"asserts": ADD}, SPENT),
        ("import time\ntime.sleep(600)", {"pairs": SQUARE}, "ran out of time"),
        ("import os\nos.close(1)\nos.close(2)\nimport time\ntime.sleep(600)", {"pairs": SQUARE}, "ran out of time"),
        ("kept = []\nwhile True:\n    kept.append(bytearray(10**7))", {"pairs": SQUARE}, "ended with status 1"),
        ("while True:\n    print('x' * 10000)", {"pairs": SQUARE}, "printed more than 64 KiB"),
        ("def add(a, b):\n    return 'x' * 10**8", {"asserts": ADD}, "line 1"),
        ("def add(a, b):\n    kept = []\n    kept.append(kept)\n    return kept", {"asserts": ADD}, "RecursionError"),
    ],
)
def test_wrong_code_fails_and_it_is_said_why(grade, code, tests, why):
    verdict = grade(code, **tests)
    assert (verdict.reward, verdict.acc, verdict.pred) == (-1.0, 0.0, "failed")
    assert re.search(why if why == SPENT else re.escape(why), verdict.why), verdict.why


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        "print('ok')\nprint('passed')",
        "def add(a, b):\n    import os\n    os._exit(0)",
        "class Equal:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Equal()",
        "class Equal(int):\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Equal(7)",
        "import builtins\nbuiltins.AssertionError = SystemExit\nassert_ = True\ndef add(a, b):\n    return 7",
        "import ast, runpy\nast.literal_eval = runpy.run_path = lambda *a: None\ndef add(a, b):\n    return 7",
        "def add(a, b):\n    raise SystemExit(0)",
        "import os\nos.write(3, b\"('error', 'eval', 'exit(0)')\\n\" * 9)\ndef add(a, b):\n    return 7",
        "import os\nos.write(4, b\"('error', 'exit', 0)\\n\" * 9)\ndef add(a, b):\n    return 7",
        "def add(a, b):\n    raise type('SystemExit', (Exception,), {})(0)",
        "import os\nfor descriptor in range(3, 64):\n    try:\n        os.write(descriptor, b'nonsense\\n' * 9)\n"
        "    except OSError:\n        pass\ndef add(a, b):\n    return 5",
        "import sys\nfor frame in sys._current_frames().values():\n    while frame:\n"
        "        frame.f_globals['PASSED'] = 0\n        frame = frame.f_back\ndef add(a, b):\n    return 7",
    ],
)
def test_tests_are_not_fooled(grade, code):
    assert grade(code, asserts=ADD).acc == 0.0
    assert grade(code, pairs=SQUARE).acc == 0.0


def tried(statement):
    """A program that prints whether something was refused."""
    attempt = f"import ctypes, os, socket\ntry:\n    {statement}\n"
    return attempt + "except (OSError, ValueError):\n    print('refused')\nelse:\n    print('done')"


@pytest.mark.parametrize(
    "statement",
    [
        "open('/etc/passwd')",
        "open('/proc/self/environ')",
        f"open('/proc/{os.getpid()}/environ')",
        f"open({str(Path(__file__))!r})",
        "os.listdir('/')",
        "os.listdir('..' if len(os.listdir('.')) else '/tmp')",
        "open('file', 'w')",
        "open('../completion.py', 'a')",
        "open('/dev/shm/beamline', 'w')",
        "os.mkdir('folder')",
        "os.remove('../completion.py')",
        "os.chmod('../completion.py', 0)",
        "os.utime('../completion.py')",
        "os.truncate('../completion.py', 0)",
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/sh', ['sh'])",
        "socket.socket()",
        "socket.socket(socket.AF_UNIX)",
        "socket.create_connection(('127.0.0.1', 9))",
        "os.kill(os.getppid(), 0)",
        "os.killpg(0, 9)",
        "os.setsid()",
        "__import__('resource').prlimit(os.getppid(), 0)",
        "__import__('resource').setrlimit(0, (9, 9))",
        "os.setpriority(os.PRIO_PGRP, 0, 1)",
        "os.memfd_create('x') and os.write(3, b'x' * 9)",
        "ctypes.CDLL(None, use_errno=True).shmget(0, 4096, 0o1600) >= 0 or os.listdir('/')",
        "ctypes.CDLL(None).syscall(41 | 0x40000000, 2, 1, 0) >= 0 or os.listdir('/')",
    ],
)
def test_a_program_is_refused_what_is_not_its_own(grade, statement):
    verdict = grade(tried(statement), pairs=[{"stdin": "", "stdout": "refused"}])
    assert verdict.acc == 1.0, verdict.why


def test_a_program_sees_neither_environment_nor_files(grade, monkeypatch):
    monkeypatch.setenv("SECRET", "planted")
    code = "import os, sys\nprint(dict(os.environ), os.listdir('.'), len(sys.argv), 'site' in sys.modules)"
    expected = "{'LANG': 'C.UTF-8'} [] 1 False"
    verdict = grade(code, pairs=[{"stdin": "", "stdout": expected}])
    assert verdict.acc == 1.0, verdict.why


def test_nothing_is_heard_of_a_program(grade):
    """A server on loopback, of both families, hears nothing."""
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(1.0)

        def accept():
            with contextlib.suppress(TimeoutError):
                heard.append(server.accept())

        listening = threading.Thread(target=accept)
        listening.start()
        port = server.getsockname()[1]
        grade(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))", pairs=SQUARE)
        listening.join()
    assert heard == []


def test_nothing_is_left_behind(grade, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    grade("print(9)", pairs=SQUARE)
    grade("def add(a, b):\n    return 5", asserts=ADD)
    assert list(tmp_path.iterdir()) == []
    assert Path(f"/proc/self/task/{os.getpid()}/children").read_text() == ""


async def test_a_program_dies_with_the_grading_that_runs_it(start_pool):
    """The service gives up before the program's own limits end it: the grade abstains and nothing runs on."""
    pool = await start_pool("code", grade_timeout_s=3.0)
    sleeping = "```python\nimport time\ntime.sleep(600)\n```"
    ground_truth = json.dumps({"pairs": SQUARE})
    abstained, right = await pool.grade([sleeping, "```\nprint(int(input()) ** 2)\n```"], ground_truth)
    assert abstained.kind == "timeout"
    assert right.acc == 1.0
    assert [pid for pid in sandboxed() if not wait_gone(pid, 5.0)] == []


def sandboxed():
    """Processes that run a completion."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if b"beamline-code-" in command:
                yield int(folder.name)


def test_grading_takes_a_fraction_of_a_second(grade):
    started = time.monotonic()
    for _ in range(5):
        grade("def add(a, b):\n    return a + b", asserts=ADD)
    assert time.monotonic() - started < 5.0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\n```python\nb\n```", "b"),
        ("```python\na\n```\n```json\n{}\n```", "a"),
        ("  ```py\n  a\n  ```", "  a"),
        ("```\na\n\nb\n```", "a\n\nb"),
        ("```python\na", None),
        ("a", None),
        ("```python\na\n```\n```python\nb", "a"),
    ],
)
def test_the_last_python_block_counts(text, code):
    assert last_code_block(text) == code


def test_no_code_is_wrong(sandbox):
    verdict = CodeGrader(sandbox, wall_s=1.0).grade("print(9)", json.dumps({"pairs": SQUARE}))
    assert (verdict.reward, verdict.why) == (-1.0, "no Python code block")


@pytest.mark.parametrize(
    ("ground_truth", "words"),
    [
        ("5", "code needs JSON such as"),
        ("{}", "give either asserts or pairs"),
        ('{"asserts": ["assert f() =="]}', "asserts are no Python"),
        ('{"asserts": ["assert f() == 1"], "pairs": [{"stdin": "", "stdout": ""}]}', "give either asserts or pairs"),
        ('{"pairs": [{"stdin": 1, "stdout": ""}]}', "Expected `str`, got `int`"),
        ('{"tests": []}', "unknown field `tests`"),
    ],
)
def test_a_ground_truth_without_tests_is_an_error(ground_truth, words):
    with pytest.raises(ValueError) as error:
        read_tests(ground_truth)
    assert words in str(error.value)


def test_tests_that_call_with_no_plain_value_are_an_error(grade):
    with pytest.raises(ValueError, match="no plain value: function is not a plain value"):
        grade("def f(g):\n    return g(1)", asserts=["def g(x):\n    return x", "assert f(g) == 1"])


def test_output_is_compared_by_lines():
    assert same_output("a \nb\n\n", "a\nb")
    assert not same_output("a b", "ab")
    assert not same_output("", "a")


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda patch: patch.setattr(landlock, "version", lambda: 0), "this kernel has no Landlock"),
        (lambda patch: patch.setattr("platform.machine", lambda: "riscv64"), "this machine is riscv64"),
        (lambda patch: patch.setattr(landlock, "restrict", lambda rules: None), "could still reach files, writes"),
        (lambda patch: patch.setattr(seccomp, "install", lambda rules: None), "could still reach network, processes"),
    ],
)
def test_without_isolation_nothing_runs(monkeypatch, broken, words):
    broken(monkeypatch)
    with pytest.raises(ConfigError, match="cannot isolate programs here, so it does not run any") as error:
        Sandbox(LIMITS)
    assert words in str(error.value)


def test_a_program_that_is_ended_by_a_signal_has_failed(grade):
    verdict = grade("import ctypes\nctypes.string_at(0)", pairs=SQUARE)
    assert verdict.why == f"pair 0: ended with status {-signal.SIGSEGV}"
