"""Which checkpoint a run goes on from: found, and read to its last byte, before anything starts."""

from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from beamline.coordinator.progress_bar import working
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError, WeightError
from beamline.runtime.checkpoint_fit import misfit
from beamline.runtime.checkpoints import TRAINER_STATE, TrainerState, checkpoints_of, damage, resolve, root_of

type Say = Callable[[str], None]
"""Shows the user one line."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """A whole checkpoint that fits the run."""

    folder: Path
    step: int


def find_origin(config: RunConfig, run_dir: Path, *, begun: bool, say: Say) -> Origin | None:
    """What `trainer.resume_mode` asks for; None for a run that starts from its model.

    Args:
        config: with the model's directory in place.
        begun: whether the run's folder is there from an earlier start.

    Raises:
        ConfigError: the checkpoint is damaged, of another model, other adapters or another type, or has all the steps
            already; all are damaged, or the run has ended without one; or the run would mix its checkpoints with those
            of another.
    """
    root = root_of(run_dir, config.trainer.checkpoint_path)
    if config.trainer.resume_mode == "latest":
        return _latest(config, run_dir, root, begun=begun, say=say)
    if earlier := [facts.path for facts in checkpoints_of(root)]:
        raise ConfigError(
            f"{root} has checkpoints of an earlier run, {earlier[0]} among them: go on from them with "
            "trainer.resume_mode=latest, or give this run a trainer.checkpoint_path of its own"
        )
    if config.trainer.resume_mode == "from_path":
        return _named(config, Path(config.trainer.resume_path), say)
    return None


def check_named(config: RunConfig) -> None:
    """The checkpoint that is asked for is there, as far as is seen without reading it: before a folder is replaced.

    Raises:
        ConfigError: it is missing or incomplete.
    """
    if config.trainer.resume_mode == "from_path":
        try:
            resolve(Path(config.trainer.resume_path), deep=False)
        except WeightError as error:
            raise ConfigError(f"trainer.resume_path={config.trainer.resume_path}: {error}") from None


def newest_whole(config: RunConfig, run_dir: Path, say: Say) -> Origin | None:
    """The run's newest checkpoint that is whole; says which are passed over, and why.

    Raises:
        ConfigError: it does not fit the run.
    """
    found = checkpoints_of(root_of(run_dir, config.trainer.checkpoint_path))
    for facts in sorted(found, key=lambda facts: not Path(facts.path).name.startswith(".")):  # drafts, then by age
        folder = Path(facts.path)
        if wrong := facts.wrong or _read_through(folder, facts.num_bytes):
            say(f"checkpoint {folder} is passed over: {wrong}")
        else:
            return _fitting(config, folder)
    return None


def newest_seen(config: RunConfig, run_dir: Path) -> Path | None:
    """The run's newest checkpoint that looks whole; its files are not read."""
    seen = checkpoints_of(root_of(run_dir, config.trainer.checkpoint_path))
    return next((Path(facts.path) for facts in seen if not facts.wrong), None)


def starting_from(config: RunConfig, origin: Origin | None) -> RunConfig:
    """The configuration as the services read it: with the checkpoint's folder where there is one."""
    mode = "latest" if origin and config.trainer.resume_mode == "none" else config.trainer.resume_mode
    path = str(origin.folder) if origin else ""
    return replace(config, trainer=replace(config.trainer, resume_mode=mode, resume_path=path))


def _latest(config: RunConfig, run_dir: Path, root: Path, *, begun: bool, say: Say) -> Origin | None:
    if config.trainer.resume_path:
        raise ConfigError(
            f"trainer.resume_path={config.trainer.resume_path} with resume_mode=latest, which finds its checkpoint "
            "itself: leave resume_path out, or use resume_mode=from_path"
        )
    if origin := newest_whole(config, run_dir, say):
        say(going_on(origin))
        return origin
    has_named = any(not Path(facts.path).name.startswith(".") for facts in checkpoints_of(root))
    if begun and (has_named or (run_dir / "summary.json").is_file()):
        raise ConfigError(f"{root} has no whole checkpoint to go on from: begin the run anew with --overwrite")
    # Who is killed before the first checkpoint, and started again by a script, has lost nothing that could be kept.
    say(f"no checkpoint in {root} yet: the run begins with step 1")
    return None


def going_on(origin: Origin) -> str:
    """Where the run goes on, in words."""
    return f"going on after step {origin.step}, from {origin.folder}"


def _read_through(folder: Path, num_bytes: int) -> str:
    """What is wrong with a checkpoint, every byte of it read; empty where it is whole."""
    with working() as work:
        work.part(f"reading checkpoint {folder}", num_bytes)
        return damage(folder, advance=work.advance)


def _named(config: RunConfig, path: Path, say: Say) -> Origin:
    try:
        with working(f"reading the checkpoint at {path}") as work:
            folder = resolve(path, advance=work.advance)
        origin = _fitting(config, folder)
        say(going_on(origin))
        return origin
    except WeightError as error:
        raise ConfigError(f"trainer.resume_path={path}: {error}") from None


def _fitting(config: RunConfig, folder: Path) -> Origin:
    """Raises ConfigError where a whole checkpoint is not one that this run can go on from."""
    if wrong := damage(folder, deep=False, model=Path(config.model.path)):
        raise ConfigError(f"checkpoint {folder} does not fit model.path: {wrong}; give the model that it is of")
    state = msgspec.json.decode((folder / TRAINER_STATE).read_bytes(), type=TrainerState)
    if wrong := misfit(folder, state, config.model.lora):
        raise ConfigError(wrong)
    if state.dtype != config.model.dtype:
        raise ConfigError(
            f"checkpoint {folder} is of model.dtype={state.dtype}, not {config.model.dtype}: set model.dtype="
            f"{state.dtype}"
        )
    if state.step >= config.trainer.num_steps:
        raise ConfigError(
            f"checkpoint {folder} has {state.step} steps behind it, and trainer.num_steps={config.trainer.num_steps}: "
            "raise trainer.num_steps to go on"
        )
    return Origin(folder=folder, step=state.step)
