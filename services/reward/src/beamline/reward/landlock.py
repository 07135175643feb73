"""Landlock: which files a process may read, from then on and for good. No privilege is needed; Linux, x86-64.

See landlock(7). What it does not rule (permissions, owners, times and attributes of files) `seccomp` refuses.
"""

import ctypes
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from beamline.protocol.errors import ConfigError

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls."""
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1, 2, 4, 8, 1 << 14
READ = _EXECUTE | _READ_FILE | _READ_DIR
READ_WRITE = READ | _WRITE_FILE | _TRUNCATE
"""Of files that are there: none can be made or removed."""
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Rights of a kernel's version of Landlock that concern files; later ones have 16."""

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Of the kernel's Landlock; 0 where it has none, or it is off."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG))


@contextmanager
def ruleset(allowed: Iterable[tuple[Path, int]]) -> Iterator[int]:
    """A descriptor of rules under which nothing is allowed but these rights beneath these paths, where they exist.

    Raises:
        ConfigError: no Landlock.
    """
    if not (found := version()):
        raise ConfigError(
            "this kernel has no Landlock (Linux 5.13 and later, with landlock among its security modules)"
        )
    handled = (1 << _NUM_RIGHTS.get(found, 16)) - 1
    attributes = struct.pack("=Q", handled)
    descriptor = _checked(_libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
    try:
        for path, rights in allowed:
            if path.exists():
                _allow(descriptor, path, rights & handled & ~(0 if path.is_dir() else _READ_DIR))
        yield descriptor
    finally:
        os.close(descriptor)


def restrict(descriptor: int) -> None:
    """Put this process under the rules. It must have given up new privileges. Raises OSError."""
    _checked(_libc.syscall(_RESTRICT_SELF, descriptor, 0))


def _allow(descriptor: int, path: Path, rights: int) -> None:
    beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, beneath)
        _checked(_libc.syscall(_ADD_RULE, descriptor, _RULE_PATH_BENEATH, rule, 0))
    finally:
        os.close(beneath)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "landlock")
    return result
