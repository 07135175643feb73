"""Rows of the metric schema: what the coordinator records of a step, wherever it was measured."""

from beamline.protocol.metric_row import Metric, gauge, step

RING_METRICS: tuple[Metric, ...] = (
    step(
        "reward/mean", "reward", "coordinator", "mean reward, overlong penalty included; abstained samples are left out"
    ),
    step("reward/std", "reward", "coordinator", "standard deviation of the same rewards"),
    step("reward/accuracy", "share", "coordinator", "samples that the grader found correct"),
    step("reward/pass_at_n", "share", "coordinator", "groups with at least one correct sample"),
    step(
        "reward/abstained", "samples", "coordinator", "samples without a grade: the grader crashed or ran out of time"
    ),
    step(
        "reward/abstained/<kind>",
        "samples",
        "coordinator",
        "the same by kind: `timeout`, `crash`, `memory`, `error` (the grader raised, or gave no verdict), "
        "`aborted` (the trajectory never ended), `environment`",
    ),
    step(
        "environment/broken",
        "samples",
        "coordinator",
        "ended because their environment raised, hung or crashed; they have no reward. Groups of which no sample "
        "ended count as failed instead",
    ),
    step(
        "environment/reward_mean",
        "reward",
        "coordinator",
        "mean of what the environment gave, which is part of the reward",
    ),
    step("timing/generate", "s", "coordinator", "waiting for a batch of scored groups"),
    step("timing/generate_engine", "s", "rollout", "part of generate: the longest that one group was in an engine"),
    step(
        "timing/score",
        "s",
        "reward",
        "time spent on grading, summed over the step's groups; runs beside generation and is no part of a sum",
    ),
    step(
        "timing/train",
        "s",
        "coordinator",
        "from the train batch to its policy update, the hand-over of device memory included",
    ),
    step("timing/sync", "s", "coordinator", "until every live worker serves the new policy, or is left out of it"),
    step("timing/evaluate", "s", "coordinator", "evaluating this step's policy; absent where it was not evaluated"),
    step(
        "timing/checkpoint",
        "s",
        "coordinator",
        "waiting for the trainer's copy of a policy that it keeps, and at the run's end until all is written; absent "
        "where nothing was kept",
    ),
    step(
        "timing/step",
        "s",
        "coordinator",
        "the step's phases and what lies between them; evaluation and checkpoint apart",
    ),
    step(
        "timing/train_old_logprobs",
        "s",
        "trainer",
        "part of train: log-probabilities of the batch before the first update",
    ),
    step("timing/train_reference", "s", "trainer", "part of train: the reference's, where a run has one"),
    step("timing/train_update", "s", "trainer", "part of train: forward, backward and optimizer"),
    step("timing/train_<part>", "s", "trainer", "another part of train"),
    step("throughput/generate_tokens_per_s", "tokens/s", "coordinator", "response tokens by `timing/generate`"),
    step("throughput/tokens_per_s", "tokens/s", "coordinator", "prompt and response tokens by `timing/step`"),
    step("tokens/prompt", "tokens", "coordinator", "prompt tokens, counted once a sample"),
    step(
        "tokens/response",
        "tokens",
        "coordinator",
        "response tokens: sampled ones, and what an environment wrote between them",
    ),
    step("tokens/response_mean", "tokens", "coordinator", "mean response length"),
    step("tokens/response_max", "tokens", "coordinator", "longest response"),
    step("tokens/truncated", "share", "coordinator", "samples that ended at the length limit"),
    step("tokens/trained", "tokens", "trainer", "tokens of the train batch, prompts included, padding not"),
    step("tokens/loss", "tokens", "trainer", "of these the ones that the loss mask keeps"),
    step(
        "sampling/batches_drawn",
        "batches",
        "coordinator",
        "groups that were drawn for the step, as a multiple of `rollout.sampling.groups_per_step`",
    ),
    step(
        "sampling/filtered_groups",
        "groups",
        "coordinator",
        "of them, ended without use: rewards that do not differ, or no response that came to an end",
    ),
    step(
        "staleness/mean",
        "versions",
        "coordinator",
        "mean over the step's groups of (step − 1) − oldest policy version in the group",
    ),
    step("staleness/max", "versions", "coordinator", "the largest; never above `coordinator.max_staleness`"),
    step("data/epoch", "epochs", "coordinator", "how often the training set has been drawn, as a fraction"),
    step("data/position", "rows", "coordinator", "rows drawn since the run's start"),
    step(
        "data/dropped_prompts",
        "rows",
        "coordinator",
        "of them, left out because the prompt exceeds `data.max_prompt_tokens`; counted again in every epoch",
    ),
    gauge("ledger/issued", "groups", "coordinator", "groups sent to rollout; a retry is the same group"),
    gauge("ledger/trained", "groups", "coordinator", "ended in a policy update"),
    gauge(
        "ledger/filtered",
        "groups",
        "coordinator",
        "ended without use: their rewards do not differ, or no trajectory is left",
    ),
    gauge("ledger/stale", "groups", "coordinator", "ended as too old, or left over when the run ended"),
    gauge("ledger/failed", "groups", "coordinator", "ended after the last attempt failed"),
    gauge("ledger/in_flight", "groups", "coordinator", "not ended yet"),
    step(
        "eval/<source>/accuracy", "share", "coordinator", "mean over problems of the share of correct samples (avg@n)"
    ),
    step(
        "eval/<source>/accuracy_low", "share", "coordinator", "lower end of its 95 % bootstrap interval over problems"
    ),
    step("eval/<source>/accuracy_high", "share", "coordinator", "upper end"),
    step(
        "eval/<source>/pass_at_<k>",
        "share",
        "coordinator",
        "unbiased estimate of the chance that one of k samples is correct",
    ),
    step("eval/<source>/mean_length", "tokens", "coordinator", "mean response length"),
    step("eval/<source>/truncated", "share", "coordinator", "samples that ended at the length limit"),
    step(
        "eval/<source>/abstained",
        "share",
        "coordinator",
        "samples without a grade; they are in neither accuracy nor pass@k",
    ),
    step("eval/<source>/failed", "problems", "coordinator", "problems without a result after the last attempt"),
    step(
        "eval/<source>/dropped",
        "problems",
        "coordinator",
        "problems of the set that are not asked, for their prompts exceed `data.max_prompt_tokens`; in no other number",
    ),
    step("eval/<source>/num_problems", "problems", "coordinator", "size of the set"),
    step("eval/<source>/num_samples", "samples", "coordinator", "samples a problem"),
    step(
        "sync/canary_gap/<worker>",
        "nats",
        "rollout",
        "largest difference between a worker's and the trainer's log-probabilities of a fixed text after its last load",
    ),
    step(
        "sync/prepare_s/<worker>",
        "s",
        "rollout",
        "until a worker had fetched and verified the policy beside the one that it served; absent where it could not",
    ),
    step(
        "sync/load_s/<worker>",
        "s",
        "rollout",
        "from the open fence until a worker served the policy, its canary included; absent where it does not, or a "
        "heartbeat was faster than its report",
    ),
    step("sync/num_bytes", "bytes", "rollout", "fetched of the policy by all ranks of all workers"),
    step("sync/adapter_bytes", "bytes", "trainer", "with LoRA: size of a policy, which is its adapters"),
    step("sync/adapter_share", "share", "trainer", "with LoRA: the same as a share of what all weights would be"),
    step(
        "sync/left_out",
        "workers",
        "coordinator",
        "the run goes on without so many, for they serve an older policy; `beamline status` says why",
    ),
    step("checkpoint/num_bytes", "bytes", "trainer", "size of the checkpoint; absent where there was none"),
    step("checkpoint/copy_s", "s", "trainer", "the copy of what is kept, part of `timing/checkpoint`"),
    step("checkpoint/save_s", "s", "trainer", "until all was written; goes on beside the next steps"),
    step("checkpoint/failed", "saves", "coordinator", "1 where this step could not be saved; the log says why"),
    gauge(
        "resources/rss_bytes/<worker>",
        "bytes",
        "every service",
        "resident memory of a worker and of the processes it started, at its last heartbeat",
    ),
    step(
        "resources/freed_bytes/<worker>",
        "bytes",
        "every service",
        "device memory that a worker measured as freed at its last release",
    ),
)
