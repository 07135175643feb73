"""A data set against a model's tokenizer and a grader: what `beamline data check` looks at, and how it tells it."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from beamline.coordinator.launch.local import environment, interpreter
from beamline.coordinator.launch.preflight import ASSET
from beamline.coordinator.progress_bar import Work, tracked
from beamline.models import tiny, tokenizer
from beamline.models.chat import ChatTokenizer
from beamline.models.dataset_check import KINDS, CountTokens, Findings, check
from beamline.protocol.config import DataSection
from beamline.protocol.errors import BeamlineError, ConfigError, DeadlineExceeded

GRADER_DEADLINE_S = 1800.0
"""For all ground truths of a file; each has a limit of its own, after which its process is killed."""
REFUSED = 2
"""Exit code of a program that says in one line what the user has to mend."""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What to look at. An empty model leaves lengths out, an empty grader ground truths."""

    file: Path
    model: str
    max_prompt_tokens: int
    grader: str

    def run(self, base_environment: Mapping[str, str], max_kept: int | None, work: Work) -> Findings:
        """Look at every row.

        Args:
            base_environment: the user's, for the grader's program.
            max_kept: findings kept of a kind; None keeps all.
            work: is shown.

        Raises:
            ConfigError: no such file, model or grader.
            BeamlineError: the grader's program broke.
        """
        count_tokens = counter(self.model) if self.model else None
        try:
            return check(
                self.file,
                count_tokens=count_tokens,
                max_prompt_tokens=self.max_prompt_tokens,
                unread=(lambda truths: self._unread(truths, base_environment, work)) if self.grader else None,
                track=partial(tracked, work),
                max_kept=max_kept,
            )
        except BeamlineError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def lines(self, findings: Findings) -> Iterator[str]:
        """What was found, for a person."""
        for finding in findings.kept:
            where = "" if finding.row is None else f"{self.file} row {finding.row}: "
            yield f"{where}{finding.text}"
        for kind, count in self._counts(findings).items():
            left = count - sum(finding.kind == kind for finding in findings.kept)
            yield f"{kind} ({KINDS[kind]}): {count:,}" + (f", {left:,} not shown: --all" if left else "")
        total, looked_at = findings.counts.total(), f"{findings.num_rows:,} rows"
        looked_at += f", the longest prompt of {findings.longest_prompt:,} tokens" if self.model else ""
        looked_at += f", ground truths by {self.grader}" if self.grader else ""
        yield f"{self.file}: {looked_at}: " + (f"found faults: {total:,}" if total else "sound")
        if not self.model:
            yield "the lengths of the prompts were not looked at: give --model"

    def _unread(self, truths: Sequence[str], base_environment: Mapping[str, str], work: Work) -> list[str]:
        work.part(f"grader {self.grader} reads {len(truths):,} ground truths")
        return unread(self.grader, truths, base_environment)

    def json(self, findings: Findings) -> str:
        """What was found, for a program: one object on one line."""
        found = {
            "file": str(self.file),
            "num_rows": findings.num_rows,
            "longest_prompt": findings.longest_prompt if self.model else None,
            "grader": self.grader or None,
            "faults": self._counts(findings),
            "findings": [asdict(finding) for finding in findings.kept],
        }
        return json.dumps(found, ensure_ascii=False)

    def _counts(self, findings: Findings) -> dict[str, int]:
        return {kind: findings.counts[kind] for kind in KINDS if findings.counts[kind]}


def counter(model: str) -> CountTokens:
    """Counts a prompt's tokens as a run with this model and the default template arguments would have them.

    Raises:
        ConfigError: there is no such model, or it has no tokenizer.
    """
    name = model.removeprefix(ASSET)
    if model.startswith(ASSET) and name not in tiny.SPECS:
        raise ConfigError(f"--model {model}: no model is called {name!r}; use {', '.join(tiny.SPECS)}")
    try:
        chat = ChatTokenizer.load(tokenizer.ASSETS if model.startswith(ASSET) else model)
    except ValueError as error:
        raise ConfigError(f"--model {model}: {error}") from error
    arguments = DataSection().chat_template_kwargs
    return lambda messages: len(chat.encode_chat(messages, **arguments))


def unread(grader: str, truths: Sequence[str], base_environment: Mapping[str, str]) -> list[str]:
    """For each ground truth why the grader cannot read it, empty where it can: asked in the reward service's Python.

    Raises:
        ConfigError: no such grader.
        DeadlineExceeded: no end in time.
        BeamlineError: its program broke.
    """
    command = [str(interpreter("reward")), "-m", "beamline.reward.read_truths", grader]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(list(truths)).encode(),
            capture_output=True,
            env=environment(base_environment, threads=1),
            timeout=GRADER_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"grader {grader} to read {len(truths)} ground truths", GRADER_DEADLINE_S) from None
    words = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    if done.returncode == REFUSED:
        raise ConfigError(f"--grader {grader}: {words[0].removeprefix('error: ') if words else 'refused'}")
    if done.returncode != 0:
        said = words[0] if words else "it said nothing"
        raise BeamlineError(f"reading ground truths with {grader} ended with exit code {done.returncode}: {said}")
    return json.loads(done.stdout)
