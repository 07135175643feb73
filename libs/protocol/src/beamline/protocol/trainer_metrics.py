"""Rows of the metric schema: what the trainer measures of a step's batch, which travels in its policy update."""

from beamline.protocol.metric_row import Metric, step

TRAINER_METRICS: tuple[Metric, ...] = (
    step("policy/loss", "loss", "trainer", "all that is minimised, mean over the step's updates"),
    step("policy/entropy", "nats", "trainer", "mean entropy of the distribution from which a token was drawn"),
    step(
        "policy/kl",
        "nats",
        "trainer",
        "mean divergence from the reference policy by `algorithm.kl.estimator`, where a run has one; of each "
        "update's policy where it is a term of the loss, of the policy at the step's start where it is a part of "
        "the reward",
    ),
    step("policy/lr", "1", "trainer", "learning rate of the step"),
    step("policy/grad_norm", "L2 norm", "trainer", "gradient norm before clipping, mean over the step's updates"),
    step("policy/grad_norm_max", "L2 norm", "trainer", "the largest of them"),
    step("policy/clip_ratio", "share", "trainer", "tokens whose ratio the clip bounds"),
    step("policy/ratio_mean", "1", "trainer", "mean ratio; exactly 1 in the first mini-batch"),
    step("policy/mismatch_mean", "nats", "trainer", "mean mismatch, signed"),
    step(
        "policy/mismatch_abs_mean",
        "nats",
        "trainer",
        "mean of its absolute value: the gap between engine and trainer to watch",
    ),
    step("policy/mismatch_abs_p50", "nats", "trainer", "median of its absolute value"),
    step("policy/mismatch_abs_p99", "nats", "trainer", "99th percentile"),
    step("policy/mismatch_abs_max", "nats", "trainer", "largest absolute value"),
    step("policy/mismatch_large", "share", "trainer", "tokens whose absolute mismatch is over 0.1"),
    step("policy/mismatch_abs_mean/<source>", "nats", "trainer", "mean absolute mismatch of one data source"),
    step(
        "policy/mismatch_abs_mean_at_staleness/<k>",
        "nats",
        "trainer",
        "mean absolute mismatch of the tokens that were sampled from policy *s − 1 − k*",
    ),
    step("policy/num_updates", "updates", "trainer", "optimizer updates, one a mini-batch"),
    step("policy/num_micro_batches", "micro-batches", "trainer", "forward and backward passes"),
    step("loss/kl", "loss", "trainer", "the divergence's, with `algorithm.kl.place=loss`"),
    step("loss/entropy", "loss", "trainer", "the entropy bonus's; negative"),
    step(
        "packing/waste",
        "share",
        "trainer",
        "padding among the tokens of the step's forward and backward passes: what fills rows up for tensor "
        "parallelism, and the single token of a micro-batch in which a rank only keeps others company",
    ),
    step(
        "packing/heaviest_rank",
        "1",
        "trainer",
        "tokens of the data-parallel rank with the most, as a multiple of the mean; by update, for the ranks wait "
        "for each other there",
    ),
    step(
        "routing/fallback_share",
        "share",
        "trainer",
        "pairs without a row of the engine, which were routed live; all of them where a run does not replay",
    ),
    step(
        "routing/agreement",
        "share",
        "trainer",
        "replayed pairs for which the trainer's own router would have chosen the same experts",
    ),
    step(
        "routing/agreement_layer_<k>", "share", "trainer", "the same of one layer, counted from 0, dense ones included"
    ),
    step(
        "off_policy/<correction>/masked",
        "share",
        "trainer",
        "taken out of the loss; 0 for importance, which only weights",
    ),
    step("off_policy/<correction>/over", "share", "trainer", "ratio above the upper bound, or above the cap"),
    step("off_policy/<correction>/under", "share", "trainer", "ratio below the lower bound"),
    step("off_policy/<correction>/ratio_mean", "1", "trainer", "mean ratio"),
    step("off_policy/<correction>/ratio_std", "1", "trainer", "its standard deviation"),
    step("off_policy/<correction>/ratio_min", "1", "trainer", "smallest ratio"),
    step("off_policy/<correction>/ratio_max", "1", "trainer", "largest ratio; ratios are cut off at exp(±20)"),
)
