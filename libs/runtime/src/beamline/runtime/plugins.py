"""Code of the user's own, named in a recipe as `package.module:name`.

`python -m beamline.runtime.plugins KEY PATH` says whether this interpreter can load it.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from beamline.protocol.errors import ConfigError


def load_plugin(key: str, path: str) -> Callable[..., Any]:
    """Import what a setting names.

    Args:
        key: of the setting, for messages.
        path: `package.module:name`, importable from PYTHONPATH or the folder in which the run was started.

    Raises:
        ConfigError: there is no such module, it cannot be imported, or it has no callable of that name.
    """
    module_name, _, name = path.partition(":")
    where = "it is imported from the folder in which the run was started, or from PYTHONPATH"
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's own may raise anything
        raise ConfigError(f"{key}={path}: {module_name} cannot be imported ({error}); {where}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{key}={path}: {module_name} has no function or class {name}")
    return found


def main() -> None:
    """Load one; what is wrong with it is the last line on stderr."""
    _, key, path = sys.argv
    try:
        load_plugin(key, path)
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
