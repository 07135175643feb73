"""What is examined: a finished run, or a model's directory, and how its engine and trainer compute."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamline.coordinator.launch import preflight
from beamline.coordinator.launch.run_folder import in_use
from beamline.protocol.config import DataSection, EvalSet, ModelSection, RolloutSection, RunConfig, SamplingSection
from beamline.protocol.errors import ConfigError
from beamline.runtime.checkpoints import ADAPTER, POLICY
from beamline.runtime.run_files import read_config

_STEP = "global_step_"
_LATEST = "latest"
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Options:
    """What the user may say about trajectories that are made for the occasion; None leaves it to the run."""

    problems: int = 8
    samples: int = 8
    max_tokens: int | None = None
    temperature: float | None = None
    dtype: str | None = None
    data: Path | None = None
    """Parquet file of prompts; None takes the run's own, or chained sums."""
    fresh: bool = False
    """Sample even where a run has kept samples."""

    @property
    def need_sampling(self) -> bool:
        """Kept samples would not show what is asked for."""
        return self.fresh or any(v is not None for v in (self.max_tokens, self.temperature, self.data))


@dataclass(frozen=True)
class Case:
    """A subject and everything that has to be known of it."""

    name: str
    config: RunConfig
    trainer_model: Path
    """What the trainer reads: a checkpoint's folder, or a model's directory."""
    engine_model: Path
    """Hugging Face directory that an engine would serve; of a run with LoRA its base."""
    policy_version: int
    folder: Path
    """Where samples and findings lie."""
    sample: bool
    """Have an engine sample, whatever lies in the folder."""
    adapters: Path | None = None
    """That an engine would serve, in PEFT's format; None where it would serve the model as it is."""


def case_of_run(run_dir: Path, options: Options) -> Case:
    """A run that has ended.

    Raises ConfigError for one that is still going, has no checkpoint, or is not a run's folder.
    """
    if in_use(run_dir):
        raise ConfigError(f"run {run_dir.name} is still going: wait for its end, or `beamline stop {run_dir.name}`")
    config = _adjusted(read_config(run_dir), options)
    root = Path(config.trainer.checkpoint_path) if config.trainer.checkpoint_path else run_dir / "checkpoints"
    latest = root / _LATEST
    if not latest.is_symlink():
        raise ConfigError(
            f"run {run_dir.name} has no checkpoint in {root}, so its trainer's weights are gone: let a run finish a "
            f"step, or examine its model with --model {config.model.path}"
        )
    folder = latest.resolve()
    step = folder.name.removeprefix(_STEP)
    adapters = folder / ADAPTER if config.model.lora.is_on else None
    model = Path(config.model.path) if adapters else folder / POLICY
    if not step.isdigit() or not (adapters or model).is_dir():
        raise ConfigError(f"{latest} points at {folder}, which is no checkpoint: point it at a {_STEP}N in {root}")
    into = run_dir / "doctor"
    return Case(run_dir.name, config, folder, model, int(step), into, options.need_sampling, adapters)


def case_of_model(model: Path, folder: Path, options: Options) -> Case:
    """A model's directory. Raises ConfigError where neither side could use it."""
    stored = _stored_dtype(model)
    sampling = SamplingSection(max_response_tokens=64)
    config = RunConfig(
        model=ModelSection(path=str(model.resolve()), dtype=stored),
        data=DataSection(max_prompt_tokens=512),
        rollout=RolloutSection(sampling=sampling),
    )
    config = _adjusted(config, options)
    preflight.check_model(config)
    path = model.resolve()
    return Case(path.name, config, path, path, 0, folder, sample=True)


def _adjusted(config: RunConfig, options: Options) -> RunConfig:
    """The run's configuration with what the user says otherwise."""
    from msgspec.structs import replace

    if options.dtype is not None and options.dtype not in DTYPES:
        raise ConfigError(f"--precision {options.dtype}: use one of {', '.join(DTYPES)}")
    if options.temperature is not None and options.temperature <= 0:
        raise ConfigError(f"--temperature {options.temperature:g}: greedy tokens tell nothing, use a value above 0")
    sampling = config.rollout.sampling
    sampling = replace(
        sampling,
        max_response_tokens=options.max_tokens or sampling.max_response_tokens,
        temperature=options.temperature or sampling.temperature,
    )
    data = config.data
    if options.data is not None:
        preflight.check_prompts("--data", str(options.data))
        data = replace(data, evals=[EvalSet(path=str(options.data))])
    return replace(
        config,
        data=data,
        model=replace(config.model, dtype=options.dtype or config.model.dtype),
        rollout=replace(config.rollout, sampling=sampling),
    )


def _stored_dtype(model: Path) -> str:
    """As config.json says; float32 where it says nothing that a run could use."""
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return DTYPES[0]  # preflight says what is wrong with it
    found = config.get("dtype") or config.get("torch_dtype")
    return found if found in DTYPES else DTYPES[0]
