"""`beamline eval`: a recipe's evaluations of one policy, through the ring of a run that takes no step.

The trainer of that run reads the policy, publishes it and the engines check it, as at the start of any run: one way to
load weights, and accuracies that can be compared with those of training.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from beamline.coordinator.launch.display import Display
from beamline.coordinator.launch.run import run
from beamline.coordinator.launch.run_folder import LOCK_FILE
from beamline.coordinator.progress_bar import working
from beamline.coordinator.summary import Summary, read_summary
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import BeamlineError, ConfigError, WeightError
from beamline.runtime.checkpoints import ADAPTER, LATEST, POLICY, holding, resolve, root_of
from beamline.runtime.recipe import load_recipe
from beamline.runtime.run_files import read_config, run_dir

SUFFIX = "-eval"


def evaluate(
    recipe: str,
    overrides: Sequence[str],
    checkpoint: str,
    display: Display,
    base_environment: Mapping[str, str],
    *,
    overwrite: bool,
) -> tuple[Path, Summary]:
    """Evaluate and return the evaluation's own run folder with its summary.

    Args:
        checkpoint: a checkpoint's folder, a run's folder, a Hugging Face directory, or "latest" for the newest
            checkpoint of the recipe's run; empty evaluates the recipe's own model.
        base_environment: the user's.

    Raises:
        ConfigError: no such recipe or checkpoint, a damaged one, or a recipe that evaluates nothing.
        BeamlineError: as `launch.run.run`.
    """
    config = load_recipe(recipe, overrides, base_environment)
    if not config.data.evals:
        raise ConfigError(
            f"recipe {recipe} evaluates nothing: name what to evaluate on, as in "
            "data.evals=[{path: data/aime-2025.parquet, name: aime-2025}]"
        )
    own_name = any(override.startswith("run.name=") for override in overrides)
    policy = str(policy_of(checkpoint, config)) if checkpoint else config.model.path
    folder = asyncio.run(run(eval_config(config, policy, own_name=own_name), display, overwrite=overwrite))
    return folder, read_summary(folder / "summary.json")


def eval_config(config: RunConfig, policy: str, *, own_name: bool) -> RunConfig:
    """The recipe as a run that evaluates the policy and takes no step.

    Args:
        policy: Hugging Face directory, or `asset:NAME`.
        own_name: whether the user has named this run; it is called after the recipe otherwise.
    """
    name = config.run.name if own_name else config.run.name + SUFFIX
    return replace(
        config,
        run=replace(config.run, name=name),
        model=replace(config.model, path=policy),
        # No training prompt is drawn, so the recipe's need not be there: the evaluated ones stand in.
        data=replace(config.data, train=config.data.evals[0].path),
        trainer=replace(
            config.trainer,
            num_steps=0,
            eval_interval=1,
            resume_mode="none",
            resume_path="",
            checkpoint_interval=0,
            checkpoint_path="",
            export_interval=0,
            export_path="",
        ),
    )


def policy_of(checkpoint: str, config: RunConfig) -> Path:
    """The Hugging Face directory that is meant by `--checkpoint`. Raises ConfigError naming what is wrong with it."""
    path = Path(checkpoint)
    if checkpoint == LATEST and not path.exists():
        path = run_dir(config)
    if not path.is_dir():
        raise ConfigError(
            f"--checkpoint {path} is not a folder: give a checkpoint's, such as runs/demo/checkpoints/latest, or a "
            "Hugging Face directory"
        )
    if (path / LOCK_FILE).is_file():
        path = _checkpoints_of(path)
    elif (path / "config.json").is_file():
        return path.resolve()
    if not any((path / name).exists() for name in ("manifest.json", POLICY, LATEST)):
        raise ConfigError(
            f"--checkpoint {path} is neither a checkpoint, which has a manifest.json, nor a Hugging Face directory, "
            "which has a config.json"
        )
    folder = _verified(path)
    if holding(folder) == ADAPTER:
        raise ConfigError(
            f"--checkpoint {folder} holds adapters: merge them into their model with `beamline export {folder} DIR "
            "--merge`, and give that directory"
        )
    return folder / POLICY


def _checkpoints_of(run_dir: Path) -> Path:
    """Where a run has its checkpoints. Raises ConfigError when it has none."""
    root = root_of(run_dir, read_config(run_dir).trainer.checkpoint_path)
    if not root.is_dir():
        raise ConfigError(
            f"--checkpoint {run_dir}: that run has no checkpoint in {root}: one comes every "
            "trainer.checkpoint_interval steps, and with the last"
        )
    return root


def _verified(checkpoint: Path) -> Path:
    """A checkpoint's folder, its files compared with its manifest. Raises ConfigError for one that is not whole."""
    try:
        with working(f"comparing the files of {checkpoint} with its manifest"):
            return resolve(checkpoint)
    except WeightError as error:
        raise ConfigError(f"--checkpoint: {error}") from None


def check_graded(summary: Summary) -> None:
    """Raises BeamlineError where a set has no accuracy, since all its problems failed or abstained."""
    for evaluation in summary.evaluations:
        if "accuracy" not in evaluation.values:
            raise BeamlineError(
                f"no sample of {evaluation.name} was graded: the reasons are in {summary.artifacts.evals} and "
                f"{summary.artifacts.logs}"
            )
