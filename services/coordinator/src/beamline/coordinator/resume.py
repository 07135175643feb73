"""A run that goes on from a checkpoint: the coordinator becomes what its files in there say."""

import logging
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from beamline.coordinator import journal as j
from beamline.coordinator.core import Core
from beamline.coordinator.cursor import DataCursor
from beamline.coordinator.metrics_file import read_metrics
from beamline.coordinator.resume_files import CoordinatorState, read_files
from beamline.coordinator.set_aside import set_aside
from beamline.coordinator.summary import fold
from beamline.protocol.errors import ConfigError
from beamline.protocol.messages import PromptGroup

log = logging.getLogger(__name__)


def open_resume(core: Core, cursor: DataCursor, run_dir: Path) -> CoordinatorState | None:
    """What the run goes on from; None where it starts from its model, or goes on from its journal.

    To be called after the journal was replayed, and before anything is recorded: what the run's folder tells of steps
    that are done anew is set aside.

    Raises:
        ConfigError: the checkpoint lacks the coordinator's files, they are damaged, its position counts other training
            data than the run's, or the journal is of an earlier launch; nothing was changed.
    """
    path = core.config.trainer.resume_path
    if core.state.has_begun:
        _check_journal(core, path)
        return None
    found = read_files(Path(path)) if path else None
    if found is not None:
        _check_data(cursor, found)
    if aside := set_aside(run_dir, found.ledger.step if found else -1):
        log.info("what the run's folder had of steps that are done anew lies in %s", aside)
    return found


async def resume(core: Core, found: CoordinatorState, evaluated: Collection[int] = ()) -> None:
    """Journal where the run goes on; what was in flight is in flight again, and is published by `Coordinator.start`.

    A group that was in flight keeps its id, its attempt and its seeds. It is sampled anew, by the checkpoint's policy,
    even where an older one had begun it: its minimum policy version is the checkpoint's.

    Args:
        core: of a coordinator whose journal holds nothing yet.
        found: what `open_resume` has found.
        evaluated: policy versions that are evaluated, beside those of which the checkpoint knows.
    """
    prompts: list[PromptGroup] = []
    for prompt in found.ledger.open:
        with core.traces.admit(prompt.group_id, prompt.attempt) as traceparent:
            prompts.append(_renewed(core, prompt, found.ledger.step, traceparent))
    await core.commit(
        j.Resumed(
            path=str(found.folder),
            step=found.ledger.step,
            started=found.ledger.started,
            position=found.cursor.position,
            ends=msgspec.structs.asdict(found.ledger.ends),
            prompts=prompts,
            evaluated=sorted({*found.ledger.evaluated, *evaluated}),
        )
    )
    log.info("the run goes on after step %d, with %d groups in flight", found.ledger.step, len(prompts))


def evaluated_here(run_dir: Path, step: int, names: Collection[str]) -> list[int]:
    """The step, if the run's folder has all its evaluations: a checkpoint is written before its policy is evaluated."""
    evaluations, _ = fold(read_metrics(run_dir / "metrics.jsonl"))
    done = {evaluation.name for evaluation in evaluations if evaluation.step == step}
    return [step] if names and done >= set(names) else []


def _renewed(core: Core, prompt: PromptGroup, step: int, traceparent: str) -> PromptGroup:
    """As issued, but for what belongs to the moment; until it is sampled all services have yet to start."""
    allowed_s = core.config.coordinator.start_deadline_s + core.config.rollout.group_deadline_s
    return msgspec.structs.replace(
        prompt, min_policy_version=step, deadline=time.time() + allowed_s, traceparent=traceparent
    )


def _check_journal(core: Core, path: str) -> None:
    resumed = core.state.resumed
    if path and (resumed is None or Path(resumed.path) != Path(path)):
        raise ConfigError(
            f"the journal in the broker is that of a run which did not go on from {path}: remove the run's streams, "
            f"{core.bus.subjects.stream('*')}, or use another run.name"
        )


def _check_data(cursor: DataCursor, found: CoordinatorState) -> None:
    then, now = found.cursor.rows, cursor.identity
    if (then.num_rows, then.rows_hash) != (now.num_rows, now.rows_hash):
        raise ConfigError(
            f"data.train={now.source} has {now.num_rows} rows of hash {now.rows_hash}, and checkpoint {found.folder} "
            f"was trained on {then.num_rows} rows of hash {then.rows_hash} ({then.source}): go on with those, or begin "
            f"a new run on the new ones with model.path={found.folder / 'policy'}"
        )
    if then.seed != now.seed:
        raise ConfigError(
            f"checkpoint {found.folder} was trained {_order(then.seed)}, and this run draws its prompts "
            f"{_order(now.seed)}: go on with that, or begin a new run with model.path={found.folder / 'policy'}"
        )


def _order(seed: int | None) -> str:
    return "with data.shuffle=false" if seed is None else f"with data.shuffle=true and run.seed={seed}"
