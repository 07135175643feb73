"""Rows of the metric schema: what each service tells of its own work, a step at a time and live."""

from beamline.protocol.metric_row import Metric, gauge, step

SERVICE_METRICS: tuple[Metric, ...] = (
    step("engine/groups/<worker>", "groups", "rollout", "groups whose sampling ended"),
    step("engine/samples/<worker>", "samples", "rollout", "samples that ended, the aborted ones included"),
    step("engine/aborted/<worker>", "samples", "rollout", "of them, cut off before their end"),
    step("engine/prompt_tokens/<worker>", "tokens", "rollout", "prompt tokens of requests to the engine"),
    step("engine/generated_tokens/<worker>", "tokens", "rollout", "tokens that the engine sampled"),
    step("engine/busy_s/<worker>", "s", "rollout", "time in which at least one group was in the engine"),
    step("engine/tokens_per_s/<worker>", "tokens/s", "rollout", "`engine/generated_tokens` by `engine/busy_s`"),
    step("engine/prefix_hits/<worker>", "share", "rollout", "tokens looked up in the prefix cache that it had"),
    step("engine/preemptions/<worker>", "requests", "rollout", "requests that lost their cache to others"),
    step("engine/kv_cache_peak/<worker>", "share", "rollout", "the fullest that the key-value cache was"),
    gauge("engine/running/<worker>", "requests", "rollout", "requests that are being decoded"),
    gauge("engine/waiting/<worker>", "requests", "rollout", "requests that wait for a place in the engine"),
    gauge("engine/kv_cache/<worker>", "share", "rollout", "how full the key-value cache is"),
    step("grading/groups/<worker>", "groups", "reward", "groups that were graded"),
    step("grading/graded/<worker>", "samples", "reward", "verdicts, abstentions left out"),
    step("grading/abstained/<kind>/<worker>", "samples", "reward", "abstentions, by the kinds of `reward/abstained`"),
    step("grading/seconds/<worker>", "s", "reward", "from a group's arrival to its grades, summed over groups"),
    gauge("grading/running/<worker>", "groups", "reward", "groups that are being graded"),
    gauge("grading/waiting/<worker>", "groups", "reward", "groups that wait for a grading process"),
    gauge("grading/processes/<worker>", "processes", "reward", "grading processes that are alive"),
    gauge(
        "workers/policy_version/<worker>", "version", "rollout", "policy that the worker serves; -1 before the first"
    ),
    gauge("workers/in_flight/<worker>", "messages", "every service", "inputs that the worker holds"),
    gauge("workers/silent_s/<worker>", "s", "coordinator", "time since the worker's last heartbeat"),
    gauge("progress/step", "steps", "coordinator", "steps that are done"),
    gauge("progress/num_steps", "steps", "coordinator", "the step after which the run ends"),
    gauge("progress/scored_groups", "groups", "coordinator", "scored and useful groups that the next batch has"),
    gauge("progress/needed_groups", "groups", "coordinator", "groups that it takes; 0 while no batch is gathered"),
    gauge("progress/micro_batches_done", "micro-batches", "trainer", "passes of the batch under way that are done"),
    gauge("progress/micro_batches", "micro-batches", "trainer", "passes that it takes; 0 while nothing is trained"),
    gauge("progress/train_tokens", "tokens", "trainer", "tokens of the batch under way; 0 while nothing is trained"),
    gauge("queue/pending/<queue>", "messages", "coordinator", "messages of a work queue that no worker holds"),
    gauge("queue/unacked/<queue>", "messages", "coordinator", "messages that a worker holds and has not answered"),
    gauge("blobs/used_bytes", "bytes", "coordinator", "of the run's blobs: in shared memory, or in the broker"),
    gauge("blobs/free_bytes", "bytes", "coordinator", "that the blobs may still take"),
)
