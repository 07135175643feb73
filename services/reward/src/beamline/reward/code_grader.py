"""The grader `code`: a response's last Python code block has to pass the ground truth's tests.

The code runs in the sandbox, and the verdict is made outside of it: of what a program printed, or of asserts in another
program than the completion's (`call_by_value`). A program that exceeds its limits has failed; a grading that is lost
as a whole abstains, as with every grader.
"""

import contextlib
import os
import subprocess
import time
from io import FileIO
from pathlib import Path

from beamline.protocol.reward_config import CodeSection
from beamline.reward import call_by_value
from beamline.reward.code_tests import CodeTests, read_tests, same_output
from beamline.reward.grader import Grader, Verdict, right_or_wrong
from beamline.reward.sandbox import Ended, Sandbox

_CALL_BY_VALUE = Path(call_by_value.__file__)
_FENCE = "```"
_LANGUAGES = ("", "python", "python3", "py")


def make_grader(limits: CodeSection) -> Grader:
    """A grader under these limits.

    Raises:
        ConfigError: programs cannot be isolated on this machine.
    """
    return CodeGrader(Sandbox(limits), wall_s=limits.wall_s).grade


class CodeGrader:
    """Runs the tests.

    Args:
        sandbox: where programs run.
        wall_s: for all programs of one grading.
    """

    def __init__(self, sandbox: Sandbox, *, wall_s: float) -> None:
        self._sandbox = sandbox
        self._wall_s = wall_s

    def grade(self, text: str, ground_truth: str) -> Verdict:
        """+1 where all tests pass, -1 where one fails or there is no code.

        Raises:
            ValueError: a ground truth without tests.
        """
        tests = read_tests(ground_truth)
        code = last_code_block(text)
        if code is None:
            return right_or_wrong(False, why="no Python code block")
        with self._sandbox.folder() as folder:
            program = folder / "completion.py"
            program.write_text(code, encoding="utf-8", errors="replace")
            deadline = time.monotonic() + self._wall_s
            failure = (self._run_pairs if tests.pairs else self._run_asserts)(folder, program, tests, deadline)
        return right_or_wrong(not failure, pred="failed" if failure else "passed", why=failure)

    def _run_pairs(self, folder: Path, program: Path, tests: CodeTests, deadline: float) -> str:
        """The first failure, in words; empty when all pass."""
        for number, pair in enumerate(tests.pairs):
            given = folder / "stdin"
            given.write_text(pair.stdin, encoding="utf-8")
            with given.open("rb") as stdin:
                process = self._sandbox.start(program, folder=folder, stdin=stdin.fileno(), stdout=subprocess.PIPE)
            ended = self._sandbox.finish(process, deadline)
            printed = ended.output.decode("utf-8", errors="replace")
            if ended.status != 0:
                return f"pair {number}: {_describe(ended)}"
            if not same_output(printed, pair.stdout):
                return f"pair {number}: printed {printed[:60]!r}, expected {pair.stdout[:60]!r}"
        return ""

    def _run_asserts(self, folder: Path, program: Path, tests: CodeTests, deadline: float) -> str:
        """The first failure, in words; empty when all pass. Raises ValueError for tests that cannot be run."""
        checks = folder / "tests.py"
        checks.write_text(tests.program, encoding="utf-8")
        with contextlib.ExitStack() as open_ends:
            calls_in, calls_out, answers_in, answers_out = _two_pipes(open_ends)
            completion = self._sandbox.start(
                *(_CALL_BY_VALUE, "serve", str(program)),
                folder=folder,
                stdin=calls_in.fileno(),
                stdout=answers_out.fileno(),
            )
            open_ends.enter_context(completion)
            open_ends.callback(completion.kill)
            # These are the completion's own now: the other side sees when it is gone.
            calls_in.close()
            answers_out.close()
            to_completion = (calls_out.fileno(), answers_in.fileno())
            tester = self._sandbox.start(
                *(_CALL_BY_VALUE, "check", str(checks), *map(str, to_completion), *tests.functions),
                folder=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                passed=to_completion,
            )
            ended = self._sandbox.finish(tester, deadline)
        told = ended.output.decode("utf-8", errors="replace").strip()
        if ended.status == call_by_value.BAD_TESTS:
            raise ValueError(told)
        if ended.status == call_by_value.PASSED:
            return ""
        return told or _describe(ended)


def last_code_block(text: str) -> str | None:
    """The content of the last closed block between fences that is Python or says nothing of its language."""
    found, block, language = None, list[str](), None
    for line in text.split("\n"):
        fence = line.strip()
        if not fence.startswith(_FENCE):
            block.append(line)
        elif language is None:
            block, language = [], fence.removeprefix(_FENCE).strip().lower()
        else:
            found = "\n".join(block) if language in _LANGUAGES else found
            language = None
    return found


def _describe(ended: Ended) -> str:
    return ended.why or f"ended with status {ended.status}"


def _two_pipes(open_ends: contextlib.ExitStack) -> list[FileIO]:
    """Reading and writing end of each, closed with the stack."""
    ends = zip((*os.pipe(), *os.pipe()), ("r", "w", "r", "w"), strict=True)
    return [open_ends.enter_context(FileIO(end, mode)) for end, mode in ends]
