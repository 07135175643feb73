"""CPU threads of the trainer's ranks."""

import os

from beamline.protocol.config import Placement, RunConfig


def num_threads(config: RunConfig) -> int:
    """Of one rank: its share of `trainer.threads`, or else of the machine's cores."""
    cores = len(os.sched_getaffinity(0))
    total = config.trainer.threads or (cores if config.run.placement is Placement.COLOCATED else cores // 2)
    return max(1, total // config.trainer.parallel.world_size)
