"""Small messages for the coordinator's tests."""

from beamline.protocol import messages as m

TASK = m.Task(prompt_id="p", data_source="sums", grader="math_dapo", ground_truth="4")


def ref(owner: str) -> m.BlobRef:
    return m.BlobRef(owner=owner, key=f"{owner}.0", kind="trajectories", num_bytes=1, checksum="0" * 16)


def prompt(number: int, *, attempt: int = 0, deadline: float = 1e12, samples: int = 2) -> m.PromptGroup:
    return m.PromptGroup(
        group_id=f"g-{number:06d}",
        attempt=attempt,
        purpose=m.Purpose.TRAIN,
        task=TASK,
        prompt_tokens=[1, 2, 3],
        sampling=m.Sampling(temperature=1.0, top_p=1.0, max_tokens=8),
        seeds=list(range(samples)),
        min_policy_version=0,
        deadline=deadline,
    )


def scored(group: m.PromptGroup, rewards: list[float | None], *, version: int = 0, lengths: list[int] | None = None):
    lengths = lengths or [4] * len(rewards)
    return m.ScoredGroup(
        group_id=group.group_id,
        attempt=group.attempt,
        purpose=group.purpose,
        task=group.task,
        worker="reward-0",
        trajectories=ref(group.group_id),
        num_prompt_tokens=len(group.prompt_tokens),
        response_lengths=lengths,
        finish_reasons=[m.FinishReason.STOP] * len(rewards),
        min_policy_version=version,
        max_policy_version=version,
        grades=[
            m.Grade(reward=r, breakdown={} if r is None else {"acc": float(r > 0)}, why="hung" if r is None else "")
            for r in rewards
        ],
        generate_s=0.5,
        score_s=0.25,
    )


def failed(group: m.PromptGroup, *, retryable: bool) -> m.GroupFailed:
    return m.GroupFailed(
        group_id=group.group_id,
        attempt=group.attempt,
        purpose=group.purpose,
        service="rollout",
        worker="rollout-0",
        kind="engine",
        text="the engine gave up",
        retryable=retryable,
    )


def heartbeat(
    service: str,
    worker: str,
    *,
    incarnation: str = "a",
    version: int = -1,
    state: m.WorkerState = m.WorkerState.READY,
    rss_bytes: int = 1,
) -> m.Heartbeat:
    return m.Heartbeat(
        service=service,
        worker=worker,
        incarnation=incarnation,
        pid=1,
        state=state,
        policy_version=version,
        in_flight=0,
        rss_bytes=rss_bytes,
    )


def policy_prepared(
    worker: str, version: int, *, attempt: int = 1, incarnation: str = "a", error: str = ""
) -> m.PolicyPrepared:
    return m.PolicyPrepared(
        worker=worker,
        incarnation=incarnation,
        policy_version=version,
        attempt=attempt,
        num_bytes=100,
        prepare_s=0.25,
        error=error,
    )


def policy_loaded(
    worker: str, version: int, *, attempt: int = 1, incarnation: str = "a", error: str = ""
) -> m.PolicyLoaded:
    return m.PolicyLoaded(
        worker=worker,
        incarnation=incarnation,
        policy_version=version,
        attempt=attempt,
        load_s=0.5,
        canary_gap=2.0 if error else 1e-6,
        error=error,
    )


def lease_report(
    worker: str,
    sequence: int,
    *,
    service: str = "rollout",
    incarnation: str = "a",
    freed_bytes: int = 7 << 20,
    kept_bytes: int = 0,
) -> m.LeaseReport:
    return m.LeaseReport(
        service=service,
        worker=worker,
        incarnation=incarnation,
        sequence=sequence,
        freed_bytes=freed_bytes,
        kept_bytes=kept_bytes,
        resident_bytes=3 << 20,
    )
