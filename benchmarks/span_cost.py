"""`bin/python coordinator -m benchmarks.span_cost --out FILE`: processor microseconds of one span, on against off.

Blocks of spans that are kept take turns with blocks of spans that are not, in one process; what decides is the sender's
traceparent, as on the bus. Export to the file is part of a block.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import msgspec
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from beamline.protocol.messages import PromptGroup, Purpose, Sampling, Task
from beamline.protocol.telemetry_config import TelemetrySection
from beamline.runtime.telemetry import start_tracing, stop_tracing
from beamline.runtime.trace_context import handling_span, trace_headers

NUM_BLOCKS, BLOCK = 20, 500
GROUP = PromptGroup(
    group_id="g-000001",
    attempt=0,
    purpose=Purpose.TRAIN,
    task=Task(prompt_id="sums-1", data_source="chained-sums", grader="math_dapo", ground_truth="42"),
    prompt_tokens=[1, 2, 3],
    sampling=Sampling(temperature=1.0, top_p=1.0, max_tokens=16),
    seeds=[1, 2],
    min_policy_version=0,
    deadline=0.0,
)
SENDER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flag}"


def block_us(headers: Mapping[str, str]) -> float:
    """Of one span, with its way in, its way out and its export."""
    begin = time.process_time()
    for _ in range(BLOCK):
        with handling_span("rollout", GROUP, headers):
            trace_headers()
    provider = trace.get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    provider.force_flush()
    return (time.process_time() - begin) / BLOCK * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start_tracing("bench", "bench", "bench", Path(folder), TelemetrySection())
        kept, dropped = ({"traceparent": SENDER.format(flag=flag)} for flag in ("01", "00"))
        added = [block_us(kept) - block_us(dropped) for _ in range(NUM_BLOCKS)]
        stop_tracing()
    arguments.out.write_bytes(msgspec.json.encode(median(added)))


if __name__ == "__main__":
    main()
