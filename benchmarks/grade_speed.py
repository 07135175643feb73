"""Gradings a second: the reward service's work beside the math-verify library used bare. Runs in reward's environment.

Both grade the same groups with as many processes as there are cores, one after the other in every round: the scorer
takes messages, reads their texts from blobs and grades in its pool; the bare side is one process a core, which parses
and verifies and does nothing else. Neither limits a grading by a signal. Processes live over all rounds on both sides.

    bin/python reward -m benchmarks.grade_speed --out=FILE
"""

import argparse
import asyncio
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from beamline.protocol.blobs import Trajectories, cumulative, encode_blob, pack_float32, pack_int32
from beamline.protocol.messages import FinishReason, Purpose, Task, TrajectoryGroup
from beamline.protocol.reward_config import RewardSection
from beamline.reward.pool import Graders
from beamline.reward.scorer import Scorer
from beamline.runtime.memory_blobs import MemoryBlobStore

GROUP_SIZE = 8
NUM_CORES = len(os.sched_getaffinity(0))
ROUNDS = 15
"""Short ones: a slow moment of the machine falls on few of them."""
NUM_GROUPS = {"math_dapo": 500, "math_verify": 60}
WORK = "So we add the two terms and see that each side of it has the same value as before. " * 8
ANSWERS = (
    *(r"\frac{{{a}}}{{{b}}}", r"{a}\sqrt{{{b}}}", "{a}", r"({a}, {b})", r"x^2 + {a}x - {b}", r"\frac{{{a}\pi}}{{{b}}}"),
    *(r"{a}{b},\!000", r"\left[{a}, {b}\right)", r"{a}.{b}", r"{a} + {b}i", r"\{{{a}, {b}\}}", r"\sqrt[3]{{{a}}}"),
)


def make_groups(num_groups: int) -> list[tuple[str, list[str]]]:
    """Ground truths, each with responses of some hundred words of which about half are right."""
    draw = random.Random(0)
    groups: list[tuple[str, list[str]]] = []
    for _ in range(num_groups):
        form = draw.choice(ANSWERS)
        truth = form.format(a=draw.randint(2, 99), b=draw.randint(2, 99))
        others = [form.format(a=draw.randint(2, 99), b=draw.randint(2, 99)) for _ in range(GROUP_SIZE)]
        said = [draw.choice([truth, other]) for other in others]
        groups.append((truth, [_response(answer) for answer in said]))
    return groups


def _response(answer: str) -> str:
    return f"{WORK}\nThis is $\\boxed{{{answer}}}$."


def main() -> None:
    """Measure, or be one process of the bare side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--bare", type=int, help="which of the bare side's processes to be")
    arguments = parser.parse_args()
    if arguments.bare is not None:
        grade_bare(arguments.bare)
    else:
        arguments.out.write_bytes(msgspec.json.encode(asyncio.run(measure())))


async def measure() -> dict[str, list[float]]:
    """Gradings a second by side and round: all sides in turn in every round, the first of which is warm-up."""
    speeds: dict[str, list[float]] = {"math_dapo": [], "math_verify": [], "math_verify_bare": []}
    graders = Graders(NUM_GROUPS, RewardSection(workers=NUM_CORES))
    await graders.start()
    blobs = MemoryBlobStore()
    scorer = Scorer(worker="reward-0", graders=graders, blobs=blobs)
    messages = {name: await make_messages(blobs, name, number) for name, number in NUM_GROUPS.items()}
    try:
        with bare_processes() as bare:
            for number in range(1 + ROUNDS):
                # Turned round every time, so that neither side always has the machine that the other one left.
                for name in sorted(speeds, reverse=bool(number % 2)):
                    bare_side = name == "math_verify_bare"
                    rate = bare_per_s(bare) if bare_side else await scored_per_s(scorer, messages[name])
                    speeds[name].append(rate)
    finally:
        await graders.close()
    return {name: rates[1:] for name, rates in speeds.items()}


async def make_messages(blobs: MemoryBlobStore, grader: str, num_groups: int) -> list[TrajectoryGroup]:
    """The groups as rollout sends them; `math_dapo` reads a label where `math_verify` reads a box."""
    label = "Answer: " if grader == "math_dapo" else "This is "
    messages: list[TrajectoryGroup] = []
    for number, (truth, texts) in enumerate(make_groups(num_groups)):
        said = [text.replace("This is ", label) for text in texts]
        messages.append(await make_message(blobs, f"{grader}-{number}", grader, truth, said))
    return messages


async def make_message(
    blobs: MemoryBlobStore, group_id: str, grader: str, ground_truth: str, texts: list[str]
) -> TrajectoryGroup:
    """One group, with 200 tokens a response."""
    lengths = [200] * len(texts)
    trajectories = Trajectories(
        group_id=group_id,
        prompt_tokens=pack_int32([1]),
        cu_seqlens=cumulative(lengths),
        tokens=pack_int32([3] * sum(lengths)),
        loss_mask=memoryview(b"\1" * sum(lengths)),
        rollout_logprobs=pack_float32([-0.5] * sum(lengths)),
        finish_reasons=[FinishReason.STOP] * len(texts),
        version_spans=[[] for _ in texts],
        texts=texts,
    )
    return TrajectoryGroup(
        group_id=group_id,
        attempt=0,
        purpose=Purpose.TRAIN,
        task=Task(prompt_id=group_id, data_source="bench", grader=grader, ground_truth=ground_truth),
        worker="rollout-0",
        trajectories=await blobs.put(group_id, "trajectories", encode_blob(trajectories)),
        num_prompt_tokens=1,
        response_lengths=lengths,
        finish_reasons=trajectories.finish_reasons,
        min_policy_version=0,
        max_policy_version=0,
        generate_s=0.0,
    )


async def scored_per_s(scorer: Scorer, groups: Sequence[TrajectoryGroup]) -> float:
    """All groups at once, as many of them graded at a time as there are workers."""
    begin = time.monotonic()
    scored = await asyncio.gather(*(scorer.handle(group) for group in groups))
    assert len(scored) == len(groups)
    return GROUP_SIZE * len(groups) / (time.monotonic() - begin)


@contextmanager
def bare_processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """One a core, with the library loaded."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.grade_speed", f"--bare={core}"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                )
            )
            for core in range(NUM_CORES)
        ]
        for process in processes:
            stack.callback(process.kill)
            hear(process)
        yield processes


def bare_per_s(processes: Sequence[subprocess.Popen[bytes]]) -> float:
    """All processes grade their shares at the same time; their own rates, summed: none waits for the other's end."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
    return sum(float(hear(process)) for process in processes)


def hear(process: subprocess.Popen[bytes]) -> bytes:
    """Wait for a line of it; its end is an error."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"a process of the bare side ended: {process.args}"
    return line


def grade_bare(core: int) -> None:
    """Grade every group that is this process's, once for each line on standard input; tells gradings a second."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    groups = make_groups(NUM_GROUPS["math_verify"])[core::NUM_CORES]
    print("ready", flush=True)
    for _ in sys.stdin:
        begin = time.monotonic()
        for truth, texts in groups:
            expected = parse(f"${truth}$", parsing_timeout=0)
            for text in texts:
                verify(expected, parse(text, parsing_timeout=0), timeout_seconds=0)
        print(GROUP_SIZE * len(groups) / (time.monotonic() - begin), flush=True)


if __name__ == "__main__":
    main()
