"""Settings that can be given by environment variable: one table, read by recipe loading alone.

An override on the command line wins over them, they win over the recipe.
"""

from collections.abc import Callable, Mapping

from beamline.protocol.errors import ConfigError
from beamline.runtime.config_keys import Tree

REASONING_EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
_LOGGERS: dict[str, Tree] = {"console": ["console", "jsonl"], "wandb": ["console", "jsonl", "wandb"]}


def _integer(text: str) -> Tree:
    return int(text)


def _effort(text: str) -> Tree:
    if text not in REASONING_EFFORTS:
        raise ValueError(f"use one of {', '.join(REASONING_EFFORTS)}")
    return text


def _loggers(text: str) -> Tree:
    if text not in _LOGGERS:
        raise ValueError(f"use one of {', '.join(_LOGGERS)}")
    return _LOGGERS[text]


def _text(text: str) -> Tree:
    return text


ENVIRONMENT: dict[str, tuple[str, Callable[[str], Tree]]] = {
    "MODEL_PATH": ("model.path", _text),
    "DATA_DIR": ("data.dir", _text),
    "CKPT_PATH": ("trainer.checkpoint_path", _text),
    "MAX_TRAINING_STEPS": ("trainer.num_steps", _integer),
    "REASONING_EFFORT": ("data.chat_template_kwargs.reasoning_effort", _effort),
    "LOGGER": ("run.loggers", _loggers),
    "RUN_NAME": ("run.name", _text),
}
"""Variable: key and conversion."""


def environment_tree(environment: Mapping[str, str]) -> dict[str, Tree]:
    """The settings of the variables that are set and not empty, as a configuration tree.

    Raises:
        ConfigError: a value that its key cannot take.
    """
    tree: dict[str, Tree] = {}
    for variable, (key, convert) in ENVIRONMENT.items():
        text = environment.get(variable, "")
        if not text:
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
