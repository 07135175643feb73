"""A seccomp filter: which system calls a process may make, from then on and for good. No privilege is needed.

What is refused: sockets, new processes (threads are allowed), signals, limits, whatever reaches into another process,
whatever changes a file without opening it, memory that no limit counts, and what only administrators need. A refused
call fails with EPERM. See seccomp(2); numbers are those of Linux on x86-64.
"""

import ctypes
import errno
import platform
import struct

from beamline.protocol.errors import ConfigError

ARCHITECTURE = "x86_64"

_DENIED = {
    "socket": 41,
    "fork": 57,
    "vfork": 58,
    "kill": 62,
    "shmget": 29,
    "semget": 64,
    "msgget": 68,
    "truncate": 76,
    "chmod": 90,
    "fchmod": 91,
    "chown": 92,
    "fchown": 93,
    "lchown": 94,
    "ptrace": 101,
    "setpgid": 109,
    "setsid": 112,
    "rt_sigqueueinfo": 129,
    "utime": 132,
    "mknod": 133,
    "uselib": 134,
    "personality": 135,
    "setpriority": 141,
    "sched_setparam": 142,
    "sched_setscheduler": 144,
    "vhangup": 153,
    "pivot_root": 155,
    "setrlimit": 160,
    "chroot": 161,
    "acct": 163,
    "mount": 165,
    "umount2": 166,
    "swapon": 167,
    "reboot": 169,
    "init_module": 175,
    "quotactl": 179,
    "setxattr": 188,
    "lsetxattr": 189,
    "fsetxattr": 190,
    "removexattr": 197,
    "lremovexattr": 198,
    "fremovexattr": 199,
    "tkill": 200,
    "sched_setaffinity": 203,
    "tgkill": 234,
    "utimes": 235,
    "mq_open": 240,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "ioprio_set": 251,
    "inotify_init": 253,
    "migrate_pages": 256,
    "mknodat": 259,
    "fchownat": 260,
    "futimesat": 261,
    "fchmodat": 268,
    "unshare": 272,
    "move_pages": 279,
    "utimensat": 280,
    "inotify_init1": 294,
    "rt_tgsigqueueinfo": 297,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "finit_module": 313,
    "sched_setattr": 314,
    "kexec_file_load": 320,
    "bpf": 321,
    "userfaultfd": 323,
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_open": 434,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
    "process_mrelease": 448,
    "fchmodat2": 452,
}
_CLONE, _PRLIMIT64, _CLONE3 = 56, 302, 435
_CLONE_THREAD = 0x10000
_FIRST_UNKNOWN = 463
"""Later calls than are thought of above, and those of another calling convention: all as if the kernel had none."""

_AUDIT_ARCH_X86_64 = 0xC000003E
_NR, _ARCH, _ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data; an argument is 8 bytes, its lower half first."""

_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""BPF: load a word, jump if equal, if at least, if any of these bits, return."""
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def build_filter() -> bytes:
    """The filter's instructions.

    Raises:
        ConfigError: another architecture.
    """
    if platform.machine() != ARCHITECTURE:
        raise ConfigError(f"this machine is {platform.machine()}, and the filter is written for {ARCHITECTURE}")
    refuse, absent = (_instruction(_RETURN, _ERRNO | code) for code in (errno.EPERM, errno.ENOSYS))
    return b"".join(
        [
            _instruction(_LOAD, _ARCH),
            _instruction(_EQUAL, _AUDIT_ARCH_X86_64, if_true=1),
            _instruction(_RETURN, _KILL_PROCESS),
            _instruction(_LOAD, _NR),
            _instruction(_AT_LEAST, _FIRST_UNKNOWN, if_false=1) + absent,
            # The C library then falls back to clone, whose flags can be looked at.
            _instruction(_EQUAL, _CLONE3, if_false=1) + absent,
            *(_instruction(_EQUAL, number, if_false=1) + refuse for number in _DENIED.values()),
            # Only threads.
            _instruction(_EQUAL, _CLONE, if_false=4),
            _instruction(_LOAD, _ARGUMENTS),
            _instruction(_HAS_BITS, _CLONE_THREAD, if_false=1),
            _instruction(_RETURN, _ALLOW) + refuse,
            # Only reading its own limits: process 0, and no new limit (a pointer, in two halves).
            _instruction(_EQUAL, _PRLIMIT64, if_false=8),
            *(
                _instruction(_LOAD, offset) + _instruction(_EQUAL, 0, if_false=skip)
                for offset, skip in ((_ARGUMENTS, 5), (_ARGUMENTS + 16, 3), (_ARGUMENTS + 20, 1))
            ),
            _instruction(_RETURN, _ALLOW) + refuse,
            _instruction(_RETURN, _ALLOW),
        ]
    )


def install(instructions: bytes) -> None:
    """Put this process under a filter. It must have given up new privileges. Raises OSError."""
    program = _Program(len(instructions) // 8, instructions)
    if _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """One struct sock_filter; jumps count the instructions that are left out."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
