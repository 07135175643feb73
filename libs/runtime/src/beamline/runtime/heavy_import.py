"""Imports of whole engines, without the garbage collector looking at what they bring again and again."""

import gc
import importlib
from types import ModuleType


def import_heavy(name: str) -> ModuleType:
    """Import a module that brings hundreds of thousands of objects, all of which stay.

    While they come the collector is off, and afterwards it leaves them alone: an engine is there a fifth sooner, no
    later collection walks them, and neither does the end of the process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
