"""`samples/global_step_N.jsonl`: what the policy wrote in a step, with its rewards, to be looked at by people."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from beamline.coordinator.summary import write_atomically
from beamline.protocol.blobs import Trajectories, decode_blob
from beamline.protocol.errors import BeamlineError, ConfigError
from beamline.protocol.messages import ScoredGroup
from beamline.runtime.blob_store import BlobStore

log = logging.getLogger(__name__)


class KeptCompletion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One trajectory of a group."""

    text: str
    reward: float | None
    """None when the grader abstained."""
    breakdown: dict[str, float]
    pred: str = ""
    """What the grader read as the answer."""
    why: str = ""
    """Reason of an abstention, or of a grade that needs one."""
    length: int
    """Tokens."""
    finish_reason: str
    policy_version: int
    """The newest one that it was sampled from."""


class KeptGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line: a prompt with everything that was sampled from it."""

    group_id: str
    data_source: str
    prompt: str
    ground_truth: str
    completions: list[KeptCompletion]


class ReadsTokens(Protocol):
    """What of a tokenizer is used here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens."""
        ...


class SampleFiles:
    """Keeps a few groups of each step. A step never fails by it: what goes wrong is logged.

    Args:
        folder: made when there is something to write.
        blobs: where the groups lie.
        tokenizer: of the run's model.
        num_groups: so many of each step; 0 keeps none.
    """

    def __init__(self, folder: Path, blobs: BlobStore, tokenizer: ReadsTokens, num_groups: int) -> None:
        self._folder = folder
        self._blobs = blobs
        self._tokenizer = tokenizer
        self._num_groups = num_groups

    async def keep(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """Write the first groups of a step, in order of issue, while their blobs are there."""
        chosen = sorted(groups, key=lambda group: group.group_id)[: self._num_groups]
        if not chosen:
            return
        try:
            lines = [msgspec.json.encode(await self._read(group)) + b"\n" for group in chosen]
            write_atomically(samples_path(self._folder, step), b"".join(lines))
        except (BeamlineError, OSError, ValueError) as error:
            log.error("no completions of step %d are kept: %s", step, error)

    async def _read(self, group: ScoredGroup) -> KeptGroup:
        trajectories = decode_blob(Trajectories, await self._blobs.get(group.trajectories))
        return KeptGroup(
            group_id=group.group_id,
            data_source=group.task.data_source,
            prompt=self._tokenizer.decode(
                trajectories.prompt_tokens.cast("B").cast("i").tolist(), skip_special_tokens=False
            ),
            ground_truth=group.task.ground_truth,
            completions=[self._completion(group, trajectories, sample) for sample in range(len(group.grades))],
        )

    def _completion(self, group: ScoredGroup, trajectories: Trajectories, sample: int) -> KeptCompletion:
        grade, spans = group.grades[sample], trajectories.version_spans[sample]
        return KeptCompletion(
            text=trajectories.texts[sample],
            reward=grade.reward,
            breakdown=grade.breakdown,
            pred=grade.pred,
            why=grade.why,
            length=group.response_lengths[sample],
            finish_reason=group.finish_reasons[sample].value,
            policy_version=max((span.policy_version for span in spans), default=group.max_policy_version),
        )


def samples_path(folder: Path, step: int) -> Path:
    """Where a step's groups lie; `folder` is the run's `samples`."""
    return folder / f"global_step_{step}.jsonl"


def read_samples(path: Path) -> list[KeptGroup]:
    """Raises ConfigError naming the file and the line that is not a group."""
    groups: list[KeptGroup] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            groups.append(msgspec.json.decode(line, type=KeptGroup))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} line {number} is not a group of completions ({error}): delete it") from error
    return groups
