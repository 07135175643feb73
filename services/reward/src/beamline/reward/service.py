"""The reward service: grades the groups of its work queue until it is asked to drain."""

from beamline.protocol.messages import Message, WorkerState
from beamline.reward.pool import GraderPool
from beamline.reward.scorer import Scorer, overlong_shaping
from beamline.runtime.bus import Handler
from beamline.runtime.service import ServiceContext, WorkerStatus


async def main(context: ServiceContext) -> None:
    """Serve `work.reward`.

    Raises:
        ConfigError: a grader that is not known or cannot be loaded.
    """
    settings, sampling = context.config.reward, context.config.rollout.sampling
    pool = GraderPool(settings.grader, num_workers=settings.workers, timeout_s=settings.grade_timeout_s)
    context.status.waiting_for = f"grader {settings.grader} to be loaded"
    await pool.start()
    try:
        scorer = Scorer(
            worker=context.worker,
            pool=pool,
            blobs=context.blobs,
            shaping=overlong_shaping(settings.overlong, sampling.max_response_tokens),
        )
        handle = _counted(scorer.handle, context.status)
        context.status.state, context.status.waiting_for = WorkerState.READY, ""
        # Twice the processes: the next group is read while one is graded.
        serve = context.bus.work("reward", handle, concurrency=2 * settings.workers, on_rejected=scorer.on_rejected)
        await context.until_stopped(serve)
    finally:
        await pool.close()


def _counted(handle: Handler, status: WorkerStatus) -> Handler:
    """The handler, with the groups that it holds told by the heartbeat."""

    async def counted(message: Message) -> Message | None:
        status.in_flight += 1
        try:
            return await handle(message)
        finally:
            status.in_flight -= 1

    return counted
