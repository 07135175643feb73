"""From readings to causes: what is left of the gap under each reading says what the gap is made of. Pure.

The gap is mean |l|, l = trainer's - engine's log-probability of a token. A cause that one reading undoes explains what
that reading takes away. What no reading undoes is explained by stale tokens, by bfloat16's rounding, then by weights
that differ. Legend: L loss tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from beamline.algorithms import diagnostics
from beamline.algorithms.diagnostics import Fit
from beamline.coordinator.doctor.diagnosis import Cause
from beamline.coordinator.doctor.engine_tokens import EngineTokens
from beamline.protocol import doctor

WEIGHTS, ROUTING, PRECISION, TEMPERATURE, SOFTCAP, TOKENS, STALENESS = (
    "weights", "routing", "precision", "temperature", "softcap", "tokenisation", "staleness",
)  # fmt: skip
ADAPTERS = "adapters"
"""Of a run that has some."""
LOGPROBS_LATE, LOGPROBS_EARLY = "log-probabilities one late", "log-probabilities one early"
FLOORS = {"float32": 1e-4, "bfloat16": 5e-3}
"""Mean gap that is nobody's fault. In bfloat16 it is at least that; twice the trainer's own rounding where more."""
SIZE_OF_ROUNDING = (1 / 3, 3.0)
"""A gap of that many times bfloat16's rounding is of its size."""
MIN_CORRELATION = 0.1
"""Between the deviations from float32 of two sides that round in bfloat16. Measured: 0.49 with weights in float32, 0.22
with weights that are bfloat16 already; 0.03 for other faults of that size."""
STANDARD_ERRORS = 3.0
"""How far above chance the correlation has to be as well."""


@dataclass(frozen=True)
class Evidence:
    """Everything that the causes are judged by."""

    engine: EngineTokens
    readings: Mapping[str, np.ndarray]
    """The trainer's, float64 [L]."""
    dtype: str
    routing: doctor.Routing
    temperature: float
    softcap: float | None
    policy_version: int
    """Of the trainer's weights."""
    num_weights: int
    differing_weights: list[str]
    comparable_weights: bool
    """The engine's manifest is of the same policy as the trainer's weights."""

    @property
    def own(self) -> str:
        return doctor.reading_name(self.dtype, self.routing)

    @property
    def other_routing(self) -> str:
        return doctor.reading_name(self.dtype, "live" if self.routing == "replay" else "replay")

    @property
    def mismatch_L(self) -> np.ndarray:
        """l under the run's own reading."""
        return self.readings[self.own] - self.engine.logprobs_L

    def gap(self, name: str) -> float:
        """mean |l| under a reading."""
        return diagnostics.gap(self.engine.logprobs_L, self.readings[name])

    def fits(self) -> dict[str, Fit]:
        """How close every other reading comes, those included in which log-probabilities stand one token off."""
        own_L, sequences_L = self.readings[self.own], self.engine.sequences_L
        variants = {name: column for name, column in self.readings.items() if name != self.own} | {
            LOGPROBS_LATE: diagnostics.shifted(own_L, sequences_L, -1),
            LOGPROBS_EARLY: diagnostics.shifted(own_L, sequences_L, 1),
        }
        return {fit.name: fit for fit in diagnostics.fits(self.engine.logprobs_L, own_L, variants)}

    @property
    def rounding(self) -> float:
        """How far the trainer's two precisions are apart."""
        exact_L, rounded_L = self._precisions
        return float(np.abs(rounded_L - exact_L).mean())

    @property
    def rounding_in_common(self) -> float:
        """Rank correlation of what the engine and the trainer's bfloat16 are off the trainer's float32."""
        exact_L, rounded_L = self._precisions
        return diagnostics.rank_correlation(self.engine.logprobs_L - exact_L, rounded_L - exact_L)

    @property
    def _precisions(self) -> tuple[np.ndarray, np.ndarray]:
        """The trainer in float32 and in bfloat16, with the engine's experts where they are known."""
        replayed = doctor.reading_name(self.dtype, "replay") in self.readings
        routing: doctor.Routing = "replay" if replayed else "live"
        exact_L, rounded_L = (self.readings[doctor.reading_name(d, routing)] for d in ("float32", "bfloat16"))
        return exact_L, rounded_L

    @property
    def noise_floor(self) -> float:
        """The largest gap that needs no explanation."""
        return max(FLOORS[self.dtype], 2 * self.rounding if self.dtype == "bfloat16" else 0.0)

    @property
    def weights_differ(self) -> bool:
        """Under the same policy, that is: where they should not."""
        return self.comparable_weights and bool(self.differing_weights)

    @property
    def mistakes(self) -> set[str]:
        """Causes that a reading undoes and that are wrong however little they do."""
        wrong_trace = {ROUTING} if self.routing == "replay" else set[str]()
        return {TEMPERATURE, SOFTCAP, TOKENS, ADAPTERS} | wrong_trace

    @property
    def stale_L(self) -> np.ndarray:
        return self.engine.versions_L != self.policy_version


def attribute(evidence: Evidence) -> list[Cause]:
    """Every known cause with its share of the gap, largest first."""
    fits = evidence.fits()
    undone = [
        _undone(evidence, fits, ROUTING, [evidence.other_routing]),
        _undone(evidence, fits, TEMPERATURE, [doctor.TEMPERATURE_IGNORED, doctor.TEMPERATURE_BEFORE_SOFTCAP]),
        _undone(evidence, fits, SOFTCAP, [doctor.SOFTCAP_DROPPED]),
        _undone(evidence, fits, TOKENS, [doctor.TOKENS_LATE, doctor.TOKENS_EARLY, LOGPROBS_LATE, LOGPROBS_EARLY]),
    ]
    if doctor.ADAPTERS_LEFT_OUT in fits:
        undone.append(_undone(evidence, fits, ADAPTERS, [doctor.ADAPTERS_LEFT_OUT, doctor.EXPERTS_SCALED_BY_RANK]))
    gap = evidence.gap(evidence.own)
    left = 1.0 - max(cause.share for cause in undone)
    stale = _staleness(evidence, gap, left)
    rounded = _precision(evidence, gap, left - stale.share)
    weights = _weights(evidence, left - stale.share - rounded.share)
    return sorted([*undone, stale, rounded, weights], key=lambda cause: -cause.share)


def _undone(evidence: Evidence, fits: Mapping[str, Fit], name: str, readings: list[str]) -> Cause:
    """A cause that is gone under the best of its readings."""
    tried = [fits[reading] for reading in readings if reading in fits]
    if not tried:
        return Cause(name=name, share=0.0, evidence=_NOT_READ[name])
    best = max(tried, key=lambda fit: fit.explained)
    told = f"{_told(evidence, best.name)} the gap is {best.gap:.2g}"
    return Cause(name=name, share=max(0.0, best.explained), evidence=told, fits=best.name)


def _told(evidence: Evidence, reading: str) -> str:
    """What a reading assumes, in words."""
    softcap, temperature = evidence.softcap, evidence.temperature
    return {
        doctor.TEMPERATURE_IGNORED: f"with temperature 1 in the place of {temperature:g}",
        doctor.TEMPERATURE_BEFORE_SOFTCAP: f"with temperature {temperature:g} applied before the softcap",
        doctor.SOFTCAP_DROPPED: f"without the softcap of {softcap or 0:g}",
        doctor.TOKENS_LATE: "with every response token moved back by one",
        doctor.TOKENS_EARLY: "with every response token moved on by one",
        doctor.ADAPTERS_LEFT_OUT: "without the adapters",
        doctor.EXPERTS_SCALED_BY_RANK: "with the experts' adapters scaled by alpha / rank, as the others are,",
        LOGPROBS_LATE: "with every log-probability moved back by one token",
        LOGPROBS_EARLY: "with every log-probability moved on by one token",
        doctor.reading_name(evidence.dtype, "replay"): "with the engine's experts replayed",
        doctor.reading_name(evidence.dtype, "live"): "with the trainer's own experts",
    }[reading]


_NOT_READ = {
    ROUTING: "no routes were recorded: cannot be told apart from precision",
    TEMPERATURE: "temperature is 1: nothing to get wrong",
    SOFTCAP: "the model has no softcap",
}


def _staleness(evidence: Evidence, gap: float, left: float) -> Cause:
    stale_L = evidence.stale_L
    if not stale_L.any():
        return Cause(name=STALENESS, share=0.0, evidence=f"every token was sampled by policy {evidence.policy_version}")
    apart_L = np.abs(evidence.mismatch_L)
    versions = ", ".join(map(str, np.unique(evidence.engine.versions_L[stale_L])[:5]))
    told = f"{stale_L.mean():.0%} of the tokens were sampled by policy {versions}, not {evidence.policy_version}"
    if stale_L.all():
        return Cause(name=STALENESS, share=max(0.0, left), evidence=told)
    fresh = float(apart_L[~stale_L].mean())
    excess = float((apart_L[stale_L] - fresh).sum()) / len(apart_L)
    share = min(max(0.0, excess / gap if gap else 0.0), max(0.0, left))
    return Cause(name=STALENESS, share=share, evidence=f"{told}: {apart_L[stale_L].mean():.2g} against {fresh:.2g}")


def _precision(evidence: Evidence, gap: float, left: float) -> Cause:
    """Both sides round in bfloat16. Under float32 an engine that rounds is known by the gap's size and signs.

    Each side rounds at the same places of the same numbers, so that their deviations from float32 have much in common,
    which no other fault of that size has.
    """
    rounding = evidence.rounding
    told = f"the trainer's bfloat16 is {rounding:.2g} from its float32"
    if not gap or left <= 0:
        return Cause(name=PRECISION, share=0.0, evidence=told)
    if evidence.dtype == "bfloat16":
        told = f"{told}, and the engine rounds as well"
        return Cause(name=PRECISION, share=min(left, np.sqrt(2) * rounding / gap), evidence=told)
    low, high = SIZE_OF_ROUNDING
    of_its_size = low * rounding <= left * gap <= high * rounding
    if not of_its_size or evidence.differing_weights:
        return Cause(name=PRECISION, share=0.0, evidence=told)
    correlation, chance = evidence.rounding_in_common, STANDARD_ERRORS / np.sqrt(len(evidence.engine.logprobs_L))
    alike = correlation > max(MIN_CORRELATION, chance)
    goes = "goes" if alike else "does not go"
    told = f"{told}, and the engine's distance {goes} with it (correlation {correlation:.2f})"
    return Cause(name=PRECISION, share=left if alike else 0.0, evidence=told)


def _weights(evidence: Evidence, left: float) -> Cause:
    names, number = evidence.differing_weights, evidence.num_weights
    if not number:
        return Cause(name=WEIGHTS, share=0.0, evidence="the engine's checksums are not known")
    if not evidence.comparable_weights:
        return Cause(name=WEIGHTS, share=0.0, evidence="the engine's checksums are of another policy")
    if not names:
        return Cause(
            name=WEIGHTS, share=0.0, evidence=f"all {number} tensors have the checksums that the engine verified"
        )
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    told = f"{len(names)} of {number} tensors differ from what the engine verified: {names[0]}{more}"
    return Cause(name=WEIGHTS, share=max(0.0, left), evidence=told)
