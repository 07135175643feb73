"""The reward service: grades the groups of its work queue until it is asked to drain."""

from beamline.protocol.messages import WorkerState
from beamline.reward.pool import GraderPool
from beamline.reward.scorer import Scorer, overlong_shaping
from beamline.runtime.service import ServiceContext


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
        context.status.state, context.status.waiting_for = WorkerState.READY, ""
        # Twice the processes: the next group is read while one is graded.
        serve = context.bus.work(
            "reward", scorer.handle, concurrency=2 * settings.workers, on_rejected=scorer.on_rejected
        )
        await context.until_stopped(serve)
    finally:
        await pool.close()
