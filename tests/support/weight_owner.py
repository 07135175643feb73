"""A trainer's end of a policy in shared memory: a process of its own that can be made to hang, and killed.

`python weight_owner.py MODEL VERSION SOCKET` exports the tensors of a directory and writes the manifest as a line of
hex digits. It says "asked" when a reader asks for the weights, and answers after it has read a line. For every line
that it reads it says how many readers it has; when its input closes it lets go of everything.
"""

import sys
import threading
from pathlib import Path

from safetensors.numpy import load_file

from beamline.weights.manifest import merge
from beamline.weights.passing import Hold
from beamline.weights.shm import ShmOwner
from beamline.weights.tensors import Shard


class HangingOwner(ShmOwner):
    """Answers once it is told to."""

    def __init__(self, socket: Path) -> None:
        self.may_answer = threading.Event()
        super().__init__(socket)

    def _hold(self, policy_version: int) -> Hold:
        print("asked", flush=True)
        self.may_answer.wait()
        return super()._hold(policy_version)


def main() -> None:
    model, version, socket = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    owner = HangingOwner(socket)
    tensors = load_file(model / "model.safetensors")
    owner.export(version, [Shard.whole(name, array.dtype.name, array) for name, array in tensors.items()])
    print(merge([owner.describe()]).encode().hex(), flush=True)
    for _ in sys.stdin:
        owner.may_answer.set()
        print(owner.num_readers, flush=True)
    owner.may_answer.set()
    owner.close()


if __name__ == "__main__":
    main()
