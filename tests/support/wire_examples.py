"""One full example of every wire type, no field left at its default; their bytes are pinned in tests/contract/golden.

Run as a program it writes the golden files of types that have none; it never replaces one. A change of a type is a new
version of its tag, with a new example and a new file.
"""

from pathlib import Path

from beamline.protocol import blobs as b
from beamline.protocol import messages as m
from beamline.protocol.blobs import Blob, encode_blob
from beamline.protocol.codec import encode

GOLDEN = Path(__file__).parents[1] / "contract" / "golden"

TASK = m.Task(
    prompt_id="sums-7", data_source="chained-sums", grader="math_dapo", ground_truth="42", environment="calculator"
)
SAMPLING = m.Sampling(temperature=0.75, top_p=0.5, max_tokens=56, stop=["="])
TRAJECTORIES = m.BlobRef(
    owner="g-000007", key="trajectories-1", kind="trajectories", num_bytes=1234, checksum="0123456789abcdef"
)
ROUTED = m.BlobRef(owner="g-000007", key="routed-1", kind="routed_experts", num_bytes=99, checksum="fedcba9876543210")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FINISHED = [m.FinishReason.STOP, m.FinishReason.LENGTH]
HEARTBEAT = m.Heartbeat(
    service="rollout",
    worker="rollout-1",
    incarnation="a1b2",
    pid=4711,
    state=m.WorkerState.BUSY,
    policy_version=3,
    in_flight=2,
    rss_bytes=2**31,
    waiting_for="policy 4",
    waits=[m.Wait(what="the fence of policy 4", since=1_764_000_000.5, until=1_764_000_060.5, on=["coordinator"])],
)

MESSAGES: tuple[m.Message, ...] = (
    m.PromptGroup(
        group_id="g-000007",
        attempt=1,
        purpose=m.Purpose.TRAIN,
        task=TASK,
        prompt_tokens=[1, 300, 151_935],
        sampling=SAMPLING,
        seeds=[11, 2**63 - 1],
        min_policy_version=3,
        deadline=1_764_000_000.5,
        keep_routes=True,
        traceparent=TRACEPARENT,
    ),
    m.TrajectoryGroup(
        group_id="g-000007",
        attempt=1,
        purpose=m.Purpose.EVAL,
        task=TASK,
        worker="rollout-1",
        trajectories=TRAJECTORIES,
        routed_experts=ROUTED,
        num_prompt_tokens=3,
        response_lengths=[5, 56],
        finish_reasons=FINISHED,
        min_policy_version=3,
        max_policy_version=4,
        generate_s=1.5,
    ),
    m.ScoredGroup(
        group_id="g-000007",
        attempt=1,
        purpose=m.Purpose.TRAIN,
        task=TASK,
        worker="reward-0",
        trajectories=TRAJECTORIES,
        routed_experts=ROUTED,
        num_prompt_tokens=3,
        response_lengths=[5, 56],
        finish_reasons=FINISHED,
        min_policy_version=3,
        max_policy_version=4,
        grades=[
            m.Grade(reward=0.75, breakdown={"math_dapo": 1.0, "overlong_penalty": -0.25}, pred="42", why="boxed"),
            m.Grade(reward=None, breakdown={}, pred="", why="timed out", abstention="timeout"),
        ],
        generate_s=1.5,
        score_s=0.25,
    ),
    m.GroupFailed(
        group_id="g-000007",
        attempt=2,
        purpose=m.Purpose.TRAIN,
        service="rollout",
        worker="rollout-1",
        kind="prompt_too_long",
        text="70 tokens, 64 allowed",
        retryable=True,
    ),
    m.TrainBatch(
        step=4,
        groups=[
            m.TrainGroup(
                group_id="g-000007",
                data_source="chained-sums",
                trajectories=TRAJECTORIES,
                routed_experts=ROUTED,
                advantages=[0.5, None],
                rewards=[1.0, None],
                traceparent=TRACEPARENT,
            )
        ],
        mini_batches=[m.MiniBatch(ranks=[[m.Place(group=0, sample=0)], []])],
    ),
    m.PolicyUpdate(
        step=4,
        policy_version=4,
        manifest=m.BlobRef(
            owner="policy", key="manifest-4", kind="manifest", num_bytes=77, checksum="00ff00ff00ff00ff"
        ),
        canary=m.Canary(tokens=[1, 2, 3], logprobs=[-0.5, -1.25]),
        stats={"policy/grad_norm": 0.5},
        failed_groups={"g-000007": "trajectory 1 has 3 rows of routed experts, expected 4"},
    ),
    m.PolicyPrepared(
        worker="rollout-1",
        incarnation="a1b2",
        policy_version=4,
        attempt=2,
        num_bytes=4096,
        prepare_s=0.25,
        error="checksum",
    ),
    m.Fence(policy_version=4, attempt=2, is_open=True),
    m.PolicyLoaded(
        worker="rollout-1",
        incarnation="a1b2",
        policy_version=4,
        attempt=2,
        load_s=0.125,
        canary_gap=1e-5,
        error="checksum",
    ),
    m.Phase(sequence=9, step=4, phase=m.PhaseName.SYNC, policy_version=4, granted=True),
    m.LeaseReport(
        service="rollout",
        worker="rollout-1",
        incarnation="a1b2",
        sequence=9,
        freed_bytes=1024,
        kept_bytes=16,
        resident_bytes=2048,
    ),
    m.SaveRequest(
        step=4,
        checkpoint=True,
        export=True,
        coordinator_files=m.BlobRef(owner="save-4", key="1", kind="files", num_bytes=3, checksum="0123456789abcdef"),
    ),
    m.StateCopied(step=4, copy_s=0.25),
    m.CheckpointSaved(
        step=4,
        path="runs/tiny-beam/checkpoints/global_step_4",
        export_path="runs/tiny-beam/exports/global_step_4/policy",
        num_bytes=4096,
        save_s=0.5,
        error="no room",
    ),
    HEARTBEAT,
    m.ServiceFailed(service="trainer", worker="trainer-0", error="NaN in the loss", traceback="Traceback ..."),
    m.Metrics(service="rollout", worker="rollout-1", step=4, values={"throughput/tokens_per_s": 1000.0}),
    m.EvalResult(
        step=4, policy_version=4, name="chained-sums", num_problems=256, num_samples=8, values={"accuracy": 0.5}
    ),
    m.StatusRequest(),
    m.PauseRequest(),
    m.ResumeRequest(),
    m.StopRequest(),
    m.EvalRequest(),
    m.StatusReply(
        run="tiny-beam",
        step=4,
        num_steps=40,
        phase=m.PhaseName.GENERATE,
        policy_version=4,
        paused=True,
        waiting_for="2 groups of step 5",
        ledger={"issued": 8, "trained": 6},
        workers=[HEARTBEAT],
        metrics={"reward/mean": 0.25},
        left_out={"rollout-0": "a checksum differs"},
        phase_since=1_764_000_000.5,
        silences_s={"rollout-1": 1.25},
    ),
)

BLOBS: tuple[Blob, ...] = (
    b.Trajectories(
        group_id="g-000007",
        prompt_tokens=b.pack_int32([1, 300, 151_935]),
        cu_seqlens=b.cumulative([2, 1]),
        tokens=b.pack_int32([5, 6, 7]),
        loss_mask=memoryview(bytes([1, 1, 0])),
        rollout_logprobs=b.pack_float32([-0.5, -1.25, -2.0]),
        finish_reasons=FINISHED,
        version_spans=[[b.VersionSpan(3, 0, 1), b.VersionSpan(4, 1, 2)], [b.VersionSpan(4, 0, 1)]],
        texts=["Answer: 42", "…"],
        environment_rewards=[0.5, -1.0],
    ),
    b.RoutedExperts(
        group_id="g-000007",
        num_layers=2,
        top_k=2,
        dtype="uint16",
        cu_seqlens=b.cumulative([1, 1]),
        ids=memoryview(bytes(range(16))),
    ),
)


def encoded() -> dict[str, bytes]:
    """The bytes of every example by type name."""
    messages = {type(message).__name__: encode(message) for message in MESSAGES}
    return messages | {type(blob).__name__: encode_blob(blob) for blob in BLOBS}


if __name__ == "__main__":
    for name, payload in encoded().items():
        path = GOLDEN / f"{name}.bin"
        if not path.exists():
            path.write_bytes(payload)
            print(f"wrote {path}")
