"""Recipes: YAML, environment and overrides into one checked `RunConfig`. Only this file imports Hydra and OmegaConf.

Hydra composes, in rising precedence: the defaults of `RunConfig`, the recipe (with its own `defaults` list, if any),
the environment's settings, the overrides in Hydra's grammar. What comes out is converted by msgspec; nothing is checked
again past this door.
"""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError
from beamline.runtime.config_keys import Tree, is_known, is_open_entry, nearest_keys, unknown_keys
from beamline.runtime.environment import environment_tree

_ROOT, _DEFAULTS, _ENVIRONMENT = "beamline-run", "beamline-defaults", "beamline-environment"
_AT = re.compile(r"(?s)(?P<text>.*?)(?: - at `\$\.?(?P<path>.*)`)?")


def load_recipe(
    path_or_name: str, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> RunConfig:
    """Load a recipe.

    Args:
        path_or_name: a YAML file, or the name of one in `recipes/`.
        overrides: Hydra overrides, such as `trainer.num_steps=10`, `~run.loggers`.
        environment: variables; None takes the process's own.

    Raises:
        ConfigError: no such recipe, malformed YAML or override, an unknown key, a value of the wrong type or out of
            range, or an impossible combination.
    """
    path = find_recipe(path_or_name)
    parsed = [_parse(text) for text in overrides]
    from_environment = environment_tree(os.environ if environment is None else environment)
    tree = _compose(path, [_as_hydra_wants(override) for override in parsed], from_environment)
    for key, value in unknown_keys(tree):
        raise ConfigError(f"{path}: {_unknown(key, value)}")
    try:
        return msgspec.convert(tree, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_explain(str(error), tree)}") from None


def find_recipe(path_or_name: str) -> Path:
    """The recipe's file. Raises ConfigError naming the nearest recipe when there is none."""
    path = Path(path_or_name)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path.resolve()
        raise ConfigError(f"recipe {path_or_name} does not exist{_nearest_recipe(path.stem)}")
    known = _recipes()
    if path_or_name in known:
        return known[path_or_name]
    raise ConfigError(f"recipe {path_or_name!r} does not exist{_nearest_recipe(path_or_name)}")


def _recipes() -> dict[str, Path]:
    """Recipes by name: those of the working directory before those of the repository."""
    folders = (Path(__file__).resolve().parents[5] / "recipes", Path.cwd() / "recipes")
    return {path.stem: path.resolve() for folder in folders for path in sorted(folder.glob("*.yaml"))}


def _nearest_recipe(name: str) -> str:
    known = _recipes()
    if nearest := difflib.get_close_matches(name, known, n=1, cutoff=0.4):
        return f": did you mean {nearest[0]}?"
    return f": recipes/ has {', '.join(sorted(known)) or 'none'}"


def _parse(text: str) -> Override:
    """One override, of a known key. Raises ConfigError otherwise."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"override {text!r} cannot be read ({reason}): write it as key=value, {_QUOTE}") from None
    if override.is_sweep_override():
        raise ConfigError(f"override {text!r} has several values: give one, or a list as [a,b]")
    key = override.key_or_group
    if not is_known(key):
        raise ConfigError(f"override {text!r}: {_unknown(key, None if override.is_delete() else override.value())}")
    return override


def _as_hydra_wants(override: Override) -> str:
    """`key=value` and `+key=value` both set a key, whether or not it is there; `~key` goes back to the default."""
    text = str(override.input_line)
    if override.is_delete() or override.is_force_add():
        return text
    if override.is_add():
        return f"+{text}"
    return f"++{text}" if is_open_entry(override.key_or_group) else text


def _compose(path: Path, overrides: list[str], environment: dict[str, Tree]) -> dict[str, Tree]:
    store = ConfigStore.instance()
    store.store(name=_DEFAULTS, node=msgspec.to_builtins(RunConfig()))
    store.store(name=_ENVIRONMENT, node=environment)
    store.store(name=_ROOT, node={"defaults": [_DEFAULTS, path.stem, _ENVIRONMENT, "_self_"]})
    try:
        with initialize_config_dir(config_dir=str(path.parent), version_base=None):
            composed = compose(_ROOT, overrides=overrides)
        return cast(dict[str, Tree], OmegaConf.to_container(composed, resolve=True))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None


def _unknown(key: str, value: Any) -> str:
    nearest = nearest_keys(key)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else "no key is like it"
    given = "" if value is None else f" (value {value!r})"
    return f"unknown key {key}{given}: {hint}"


def _explain(text: str, tree: Tree) -> str:
    """msgspec's complaint with the key as it is written, the value that was given, and the mend."""
    found = _AT.fullmatch(text)
    if found is None or found["path"] is None:
        return text
    complaint, key = found["text"], re.sub(r"\[(\d+)\]", r".\1", found["path"])
    value = _value_at(tree, key)
    if isinstance(value, dict) or not complaint.startswith(("Expected", "Invalid")):
        # A check of the section itself names its own key, as `grader='maths' ...`.
        return f"{key}.{complaint}" if _OWN_KEY.match(complaint) else f"{key}: {complaint}"
    allowed = complaint.partition(", got ")[0].replace("`", "").replace("Expected", "expected")
    mend = f" ({_QUOTE})" if "expected str" in allowed and not isinstance(value, str) else ""
    return f"{key}={value!r}: {allowed}{mend}"


_OWN_KEY = re.compile(r"[a-z_]+=")
_QUOTE = "a text in quotes, such as key='\"007\"'"


def _value_at(tree: Tree, key: str) -> Tree:
    for part in key.split("."):
        if isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(tree, list) and part.isdecimal():
            tree = tree[int(part)]
    return tree
