"""A rollout worker that takes one input, says so on stdout and never finishes: something to kill.

Run as `python hanging_worker.py RUN_DIR ACK_WAIT_S`.
"""

import asyncio
import sys
from pathlib import Path

from beamline.protocol.messages import Message
from beamline.runtime.credentials import read_credentials
from beamline.runtime.nats_bus import NatsBus
from brokers import SUBJECTS


async def main(run_dir: Path, ack_wait_s: float) -> None:
    bus = await NatsBus.connect(read_credentials(run_dir, "rollout"), SUBJECTS, ack_wait_s=ack_wait_s)

    async def hang(message: Message) -> None:
        print(message.group_id, flush=True)  # type: ignore[attr-defined]
        await asyncio.Event().wait()

    await bus.work("rollout", hang)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
