"""The reward service: grades the groups of its work queue until it is asked to drain."""

from beamline.protocol.messages import Message, Phase, WorkerState
from beamline.reward.meter import grading_gauges
from beamline.reward.pool import Graders
from beamline.reward.scorer import Scorer, overlong_shaping
from beamline.runtime.bus import Handler
from beamline.runtime.service import ServiceContext, WorkerStatus
from beamline.runtime.step_metrics import StepMetrics


async def main(context: ServiceContext) -> None:
    """Serve `work.reward`.

    Raises:
        ConfigError: a grader that cannot be loaded, or cannot work here.
    """
    settings, sampling = context.config.reward, context.config.rollout.sampling
    graders = Graders(context.config.graders, settings)
    context.status.waiting_for = f"graders {', '.join(graders.names)} to be loaded"
    await graders.start()
    try:
        scorer = Scorer(
            worker=context.worker,
            graders=graders,
            blobs=context.blobs,
            shaping=overlong_shaping(settings.overlong, sampling.max_response_tokens),
        )
        handle = _counted(scorer.handle, context.status)
        steps = StepMetrics("reward", context.worker, context.bus.publish, scorer.meter.take)
        context.gauges.append(lambda: grading_gauges(context.worker, graders))
        context.status.state, context.status.waiting_for = WorkerState.READY, ""
        # Twice the gradings at a time: the next group is read while one is graded.
        serve = context.bus.work("reward", handle, concurrency=2 * settings.workers, on_rejected=scorer.on_rejected)
        await context.until_stopped(serve, context.bus.follow(Phase, steps.on_phase))
    finally:
        await graders.close()


def _counted(handle: Handler, status: WorkerStatus) -> Handler:
    """The handler, with the groups that it holds told by the heartbeat."""

    async def counted(message: Message) -> Message | None:
        status.in_flight += 1
        try:
            return await handle(message)
        finally:
            status.in_flight -= 1

    return counted
