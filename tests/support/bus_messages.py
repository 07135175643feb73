"""Small messages for the bus tests."""

from beamline.protocol import messages as m


def prompt_group(index: int) -> m.PromptGroup:
    return m.PromptGroup(
        group_id=f"group-{index}",
        attempt=0,
        purpose=m.Purpose.TRAIN,
        task=m.Task(prompt_id="p", data_source="d", grader="math_dapo", ground_truth="1"),
        prompt_tokens=[1, 2, 3],
        sampling=m.Sampling(temperature=1.0, top_p=1.0, max_tokens=4),
        seeds=[index],
        min_policy_version=0,
        deadline=0.0,
    )


def group_failed(group: m.PromptGroup, kind: str = "test") -> m.GroupFailed:
    return m.GroupFailed(
        group_id=group.group_id,
        attempt=group.attempt,
        purpose=group.purpose,
        service="rollout",
        worker="rollout-0",
        kind=kind,
        text="",
        retryable=False,
    )


def phase(sequence: int) -> m.Phase:
    return m.Phase(sequence=sequence, step=0, phase=m.PhaseName.TRAIN, policy_version=0, granted=True)


def heartbeat(worker: str) -> m.Heartbeat:
    return m.Heartbeat(
        service="rollout",
        worker=worker,
        incarnation="a",
        pid=1,
        state=m.WorkerState.READY,
        policy_version=0,
        in_flight=0,
        rss_bytes=1,
    )


def status_reply() -> m.StatusReply:
    return m.StatusReply(
        run="test",
        step=3,
        num_steps=5,
        phase=m.PhaseName.TRAIN,
        policy_version=2,
        paused=False,
        waiting_for="",
        ledger={"issued": 4},
        workers=[],
        metrics={},
    )
