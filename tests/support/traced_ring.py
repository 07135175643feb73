"""A whole run on the in-memory bus in a process of its own, whose spans go to a file: `python traced_ring.py DIR HOW`.

HOW is `calm` (nothing goes wrong), `rough` (deliveries twice, services killed) or `cut` (calm, but the coordinator is
killed while it generates for step 2, and started again).
"""

import argparse
import asyncio
import logging
import sys
import time
from pathlib import Path

import msgspec

from beamline.protocol.config import Placement, RunConfig
from beamline.protocol.messages import PhaseName
from beamline.protocol.telemetry_config import TelemetrySection
from beamline.runtime.telemetry import start_tracing, stop_tracing
from ring_run import RING_DEADLINE_S, Ring, check
from scripted_services import Mishaps

NUM_STEPS = 4
ROUGH_SEED = 5
CALM = {
    "run": {"name": "ring", "placement": Placement.COLOCATED},
    "coordinator": {"start_deadline_s": RING_DEADLINE_S, "step_deadline_s": RING_DEADLINE_S},
    "rollout": {
        "replicas": 2,
        "sampling": {"groups_per_step": 48, "samples_per_group": 2, "max_response_tokens": 8},
    },
    "trainer": {"num_steps": NUM_STEPS, "eval_interval": 2},
}


class CutRing(Ring):
    """The coordinator is killed once, when groups of step 2 are out."""

    async def until_done(self) -> None:
        coordinator = asyncio.create_task(self.coordinate())
        await asyncio.sleep(0)
        while self.core.ledger.step < 1 or self.lease.phase is not PhaseName.GENERATE or not self.has_answers():
            await asyncio.sleep(0)
        coordinator.cancel()
        await asyncio.gather(coordinator, return_exceptions=True)
        await self.coordinate()

    def has_answers(self) -> bool:
        return 0 < len(self.core.ledger.unanswered()) < self.config.rollout.sampling.groups_per_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("how", choices=("calm", "rough", "cut"))
    parser.add_argument("--endpoint", default="")
    parser.add_argument("--protocol", default="grpc")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    telemetry = TelemetrySection(
        otlp_endpoint=arguments.endpoint, otlp_protocol=arguments.protocol, otlp_headers={"x-team": "sums"}
    )
    start_tracing("ring", "ring", "ring", arguments.run_dir, telemetry)
    ring = make_ring(arguments.run_dir, arguments.how)
    asyncio.run(ring.run())
    check(ring)
    begin = time.monotonic()
    stop_tracing()
    print(f"stopped within {time.monotonic() - begin:.2f} s", file=sys.stderr)


def make_ring(run_dir: Path, how: str) -> Ring:
    if how == "rough":
        return Ring(ROUGH_SEED, run_dir, duplicate=0.25)
    kind = CutRing if how == "cut" else Ring
    config = msgspec.convert(CALM, RunConfig)
    return kind(0, run_dir, config=config, mishaps=Mishaps(), num_kills=0, duplicate=0.0)


if __name__ == "__main__":
    main()
