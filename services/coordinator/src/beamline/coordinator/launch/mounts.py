"""Which filesystem a path is on, as the kernel lists them in /proc/self/mountinfo."""

import re
from pathlib import Path

import msgspec

MOUNTINFO = Path("/proc/self/mountinfo")
NETWORK = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "openafs", "9p", "virtiofs"),
        *("ceph", "lustre", "beegfs", "gpfs", "glusterfs", "orangefs", "pvfs2", "panfs", "moosefs", "hdfs"),
        *("sshfs", "s3fs", "mount-s3", "gcsfuse", "juicefs", "rclone", "davfs", "goofys"),
    )
)
"""Types of filesystems that lie on other hosts; those of FUSE without their `fuse.`."""
IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})

_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A mounted filesystem."""

    folder: Path
    type: str
    """Such as ext4 or nfs4; of FUSE without `fuse.`."""

    @property
    def is_network(self) -> bool:
        return self.type in NETWORK

    @property
    def is_memory(self) -> bool:
        return self.type in IN_MEMORY


def mount_of(path: Path, mountinfo: Path = MOUNTINFO) -> Mount:
    """The filesystem on which an absolute path without links lies, or would lie."""
    around = [mount for mount in map(_mount, mountinfo.read_text().splitlines()) if path.is_relative_to(mount.folder)]
    return max(reversed(around), key=lambda mount: len(mount.folder.parts))  # the last of one folder hides the others


def _mount(line: str) -> Mount:
    """`36 35 98:0 /root /mount/point rw,noatime shared:1 - ext4 /dev/sda1 rw`, blanks in names as `\\040`."""
    before, _, after = line.partition(" - ")
    folder = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), before.split()[4])
    return Mount(folder=Path(folder), type=after.split()[0].removeprefix("fuse."))
