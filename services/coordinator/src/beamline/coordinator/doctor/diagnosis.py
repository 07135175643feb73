"""What the doctor found: plain records, written as JSON and drawn as a page."""

import msgspec


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the parts of a diagnosis."""


class Gap(_Record, kw_only=True):
    """Trainer's less engine's log-probability, in nats a token."""

    mean_abs: float
    mean: float
    p50_abs: float
    p99_abs: float
    max_abs: float
    share_over_tenth: float
    """Share of tokens that differ by more than 0.1."""


class Reading(_Record, kw_only=True):
    """One way to compute the log-probabilities."""

    name: str
    own: bool
    """As the run's trainer computes them."""
    gap: Gap


class Cause(_Record, kw_only=True):
    """One possible cause and how much of the gap goes with it."""

    name: str
    share: float
    """Of the mean gap, in [0, 1]."""
    evidence: str
    fits: str = ""
    """The reading under which this part is gone."""


class Layer(_Record, kw_only=True):
    layer: int
    agreement: float
    """Share of tokens for which the live trainer would have chosen the engine's experts."""


class Position(_Record, kw_only=True):
    """Response tokens from `start` to before `end`."""

    start: int
    end: int
    num_tokens: int
    mean_abs: float


class Diagnosis(_Record, kw_only=True):
    """The whole finding; `sentence` says it in words."""

    sentence: str
    agrees: bool
    cause: str
    """Name of the largest cause; empty where engine and trainer agree or none is known."""
    subject: str
    """What was examined: a run or a model."""
    dtype: str
    routing: str
    """replay or live: what the run's trainer does."""
    temperature: float
    top_p: float
    sampled_version: int
    checkpoint_version: int
    """-1 for a model that is no checkpoint."""
    num_trajectories: int
    num_tokens: int
    noise_floor: float
    """Largest mean |gap| that the precision explains."""
    gap: Gap
    causes: list[Cause]
    """Largest first."""
    readings: list[Reading]
    layers: list[Layer]
    positions: list[Position]
    notes: list[str]
