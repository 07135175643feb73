"""The settings of `algorithm`: what is learned from a step's trajectories, and how."""

from beamline.protocol.section import (
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    check_choice,
    check_name,
)

ADVANTAGES = ("grpo", "rloo", "reinforce_pp", "maxrl")
LOSSES = ("clipped", "gspo", "cispo")
REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")

type Bounds = tuple[PositiveFloat, PositiveFloat]


class OffPolicySection(Section, kw_only=True):
    """Corrections for the mismatch between engine and trainer, in the order in which they apply; all off by default."""

    outlier_bounds: Bounds | None = None
    """Drop a sequence with any token whose exp(mismatch) lies outside; 1e-4 and 100 are usual."""
    token_mask_bounds: Bounds | None = None
    """Drop the tokens whose exp(mismatch) lies outside; 0.5 and 2 are usual."""
    importance: str = "none"
    """none, token or sequence: weight by min(ratio, importance_cap), truncated importance sampling."""
    importance_cap: PositiveFloat | None = None
    """Left out it is 2 for token and 5 for sequence."""
    sequence_mask: str = "none"
    """none, geometric or product: keep a sequence whose mean (product) ratio lies within sequence_mask_bounds."""
    sequence_mask_bounds: Bounds | None = None
    """Left out it is 0.99 and 1.01 for geometric, 0.5 and 2 for product."""

    def __post_init__(self) -> None:
        check_choice("importance", self.importance, ("none", "token", "sequence"))
        check_choice("sequence_mask", self.sequence_mask, ("none", "geometric", "product"))
        for name in ("outlier_bounds", "token_mask_bounds", "sequence_mask_bounds"):
            bounds = getattr(self, name)
            if bounds is not None and bounds[0] >= bounds[1]:
                raise ValueError(f"{name}={list(bounds)}: the first must be below the second")
        if self.importance == "none" and self.importance_cap is not None:
            raise ValueError(f"importance_cap={self.importance_cap} has no effect: set importance to token or sequence")
        if self.sequence_mask == "none" and self.sequence_mask_bounds is not None:
            raise ValueError("sequence_mask_bounds has no effect: set sequence_mask to geometric or product")


class KLSection(Section, kw_only=True):
    """Divergence from a frozen reference, the policy that the run starts from."""

    coefficient: NonNegativeFloat = 0.0
    """0 is off, and no reference is kept."""
    estimator: str = "k3"
    """k1, k2 or k3, of each loss token."""
    place: str = "loss"
    """loss: a term of the loss. reward: taken off a trajectory's reward, before the advantages."""

    def __post_init__(self) -> None:
        check_choice("estimator", self.estimator, ("k1", "k2", "k3"))
        check_choice("place", self.place, ("loss", "reward"))


class DynamicSamplingSection(Section, kw_only=True):
    """DAPO's: no group of a step has raw rewards that are all equal."""

    mode: str = "none"
    """none, filter (draw on until the batch is full) or replace (repeat good groups in the place of the others)."""
    max_sample_batches: Positive = 10
    """Of filter: batches drawn for one step before it trains what it has."""

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("none", "filter", "replace"))


class AlgorithmSection(Section, kw_only=True):
    """docs/algorithms.md gives the formula of every choice."""

    advantage: str = "grpo"
    """grpo, rloo, reinforce_pp, maxrl, or a function of your own."""
    normalize_std: bool = True
    """Of grpo: false is Dr.GRPO's r - mean."""
    drop_zero_variance: bool = True
    """End a group whose rewards are all equal as filtered. Of no effect with reinforce_pp, for which it has a gradient;
    set it to false where that is so for an advantage of your own."""
    dynamic_sampling: DynamicSamplingSection = DynamicSamplingSection()
    overlong_filtering: bool = False
    """Leave a trajectory that did not end by itself out of the loss."""
    loss: str = "clipped"
    """clipped, gspo, cispo, or a function of your own."""
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    """clip-higher; equal to clip_low it is plain GRPO."""
    dual_clip: float | None = None
    """Of clipped and gspo: c > 1 bounds the loss of A < 0."""
    kl: KLSection = KLSection()
    entropy_coefficient: NonNegativeFloat = 0.0
    """Of the entropy bonus; 0 is off."""
    reduction: str = "token_mean"
    """token_mean, sequence_mean, seq_mean_token_sum_norm or prompt_mean."""
    num_mini_batches: Positive = 2
    """Optimizer updates a step."""
    routing_replay: bool = True
    """R3: the trainer replays the experts that the engine chose."""
    off_policy: OffPolicySection = OffPolicySection()

    def __post_init__(self) -> None:
        check_name("advantage", self.advantage, ADVANTAGES)
        check_name("loss", self.loss, LOSSES)
        check_choice("reduction", self.reduction, REDUCTIONS)
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip={self.dual_clip}: must be above 1")
        if self.dual_clip is not None and self.loss == "cispo":
            raise ValueError(f"dual_clip={self.dual_clip} has no effect with loss=cispo: leave it out")

    @property
    def filters_zero_variance(self) -> bool:
        """Whether equal rewards end a group: set, and they have no gradient."""
        return self.drop_zero_variance and self.advantage != "reinforce_pp"
