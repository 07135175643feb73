"""Settings that can be given by environment variable: one table, read by recipe loading alone.

An override on the command line wins over them, they win over the recipe.
"""

from collections.abc import Callable, Mapping

from beamline.protocol.errors import ConfigError
from beamline.runtime.config_keys import Tree

REASONING_EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
RESUME_MODES = ("none", "latest", "from_path")
_LOGGERS: dict[str, Tree] = {"console": ["console", "jsonl"], "wandb": ["console", "jsonl", "wandb"]}


def _integer(text: str) -> Tree:
    return int(text)


def _one_of(*choices: str) -> Callable[[str], Tree]:
    def convert(text: str) -> Tree:
        if text not in choices:
            raise ValueError(f"use one of {', '.join(choices)}")
        return text

    return convert


def _loggers(text: str) -> Tree:
    _one_of(*_LOGGERS)(text)
    return _LOGGERS[text]


def _text(text: str) -> Tree:
    return text


def _optimizer_state(folder: str) -> Tree:
    return {"state": "disk" if folder else "host", "state_dir": folder}


ENVIRONMENT: dict[str, tuple[str, Callable[[str], Tree]]] = {
    "MODEL_PATH": ("model.path", _text),
    "DATA_DIR": ("data.dir", _text),
    "CKPT_PATH": ("trainer.checkpoint_path", _text),
    "CKPT_INTERVAL": ("trainer.checkpoint_interval", _integer),
    "EXPORT_PATH": ("trainer.export_path", _text),
    "RESUME_MODE": ("trainer.resume_mode", _one_of(*RESUME_MODES)),
    "OPTIMIZER_STATE_DISK_DIR": ("trainer.optimizer", _optimizer_state),
    "MAX_TRAINING_STEPS": ("trainer.num_steps", _integer),
    "REASONING_EFFORT": ("data.chat_template_kwargs.reasoning_effort", _one_of(*REASONING_EFFORTS)),
    "LOGGER": ("run.loggers", _loggers),
    "RUN_NAME": ("run.name", _text),
    "PROJECT_NAME": ("run.project", _text),
    "LOG_PATH": ("run.log_path", _text),
}
"""Variable: key and conversion."""

EMPTY_COUNTS = ("OPTIMIZER_STATE_DISK_DIR",)
"""Variables that say something when they are set and empty; the others then count as not set."""


def environment_tree(environment: Mapping[str, str]) -> dict[str, Tree]:
    """The settings of the variables that are set, as a configuration tree.

    Raises:
        ConfigError: a value that its key cannot take.
    """
    tree: dict[str, Tree] = {}
    for variable, (key, convert) in ENVIRONMENT.items():
        text = environment.get(variable, "")
        if not text and not (variable in EMPTY_COUNTS and variable in environment):
            continue
        try:
            value = convert(text)
        except ValueError as error:
            raise ConfigError(f"{variable}={text!r} in the environment (it sets {key}): {error}") from None
        _place(tree, key, value)
    return tree


def _place(tree: dict[str, Tree], key: str, value: Tree) -> None:
    *sections, leaf = key.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        assert isinstance(inner, dict)
        tree = inner
    tree[leaf] = value
