"""From evidence to a diagnosis: the sentence, the figures and the notes. Pure."""

import numpy as np

from beamline.algorithms.diagnostics import Bucket, by_position
from beamline.coordinator.doctor.attribution import PRECISION, ROUTING, WEIGHTS, Evidence, attribute
from beamline.coordinator.doctor.diagnosis import Cause, Diagnosis, Gap, Layer, Position, Reading
from beamline.protocol.doctor import KeptSamples, Recomputed, reading_name

MIN_SHARE = 0.25
"""Of the gap; a cause that explains less is not named as the largest."""
MAX_BINS = 48
"""Of positions."""
TENTH = 0.1


def diagnose(subject: str, evidence: Evidence, samples: KeptSamples, recomputed: Recomputed) -> Diagnosis:
    """Put everything together.

    Args:
        subject: what was examined, as the user calls it.
    """
    own_L, causes = evidence.mismatch_L, attribute(evidence)
    gap, floor = gap_of(own_L), evidence.noise_floor
    small = gap.mean_abs <= floor
    largest = _largest(evidence, causes, small=small)
    agrees = small and largest is None
    return Diagnosis(
        sentence=_agreement(evidence, gap, floor) if agrees else _disagreement(evidence, gap, floor, largest),
        agrees=agrees,
        cause=largest.name if largest else "",
        subject=subject,
        dtype=evidence.dtype,
        routing=evidence.routing,
        temperature=samples.temperature,
        top_p=samples.top_p,
        sampled_version=samples.policy_version,
        checkpoint_version=recomputed.policy_version,
        num_trajectories=evidence.engine.num_trajectories,
        num_tokens=len(own_L),
        noise_floor=floor,
        gap=gap,
        causes=causes,
        readings=[
            Reading(name=name, own=name == evidence.own, gap=gap_of(column - evidence.engine.logprobs_L))
            for name, column in evidence.readings.items()
        ],
        layers=[
            Layer(layer=layer, agreement=agreement)
            for layer, agreement in zip(recomputed.layers, recomputed.route_agreement, strict=True)
        ],
        positions=[
            Position(start=bucket.start, end=bucket.end, num_tokens=bucket.num_tokens, mean_abs=bucket.gap)
            for bucket in _positions(evidence)
        ],
        notes=_notes(evidence, samples, agrees),
    )


def gap_of(mismatch_L: np.ndarray) -> Gap:
    """Statistics of l."""
    apart_L = np.abs(mismatch_L)
    return Gap(
        mean_abs=float(apart_L.mean()),
        mean=float(mismatch_L.mean()),
        p50_abs=float(np.percentile(apart_L, 50)),
        p99_abs=float(np.percentile(apart_L, 99)),
        max_abs=float(apart_L.max()),
        share_over_tenth=float((apart_L > TENTH).mean()),
    )


def _positions(evidence: Evidence) -> list[Bucket]:
    """In at most MAX_BINS buckets of equal width."""
    places_L = evidence.engine.positions_L
    num_places = int(places_L.max()) + 1
    width = -(-num_places // MAX_BINS)
    edges = range(0, num_places + width, width)
    return by_position(evidence.engine.logprobs_L, evidence.readings[evidence.own], places_L, edges)


def _largest(evidence: Evidence, causes: list[Cause], *, small: bool) -> Cause | None:
    """The cause to name.

    Where the gap is small, only what is wrong however little it does: a mistake under which the trainer comes closer to
    the engine, for noise has nothing in common with a mistake, and weights that differ. In bfloat16, rounding is no
    cause to name: the floor allows for it already.
    """
    expected = {PRECISION} if evidence.dtype == "bfloat16" else set[str]()
    named = [
        cause
        for cause in causes
        if cause.share >= MIN_SHARE and cause.name not in expected and (not small or cause.name in evidence.mistakes)
    ]
    if small and not named and evidence.weights_differ:
        return next(cause for cause in causes if cause.name == WEIGHTS)
    return named[0] if named else None


def _agreement(evidence: Evidence, gap: Gap, floor: float) -> str:
    return (
        f"The engine and the trainer agree: their log-probabilities differ by {gap.mean_abs:.2g} a token on average, "
        f"and {evidence.dtype} alone explains up to {floor:.2g}."
    )


def _disagreement(evidence: Evidence, gap: Gap, floor: float, largest: Cause | None) -> str:
    if largest is not None and largest.name == WEIGHTS and gap.mean_abs <= floor:
        return (
            f"The weights differ, though the log-probabilities are only {gap.mean_abs:.2g} a token apart on average: "
            f"{largest.evidence}."
        )
    apart = f"The engine's and the trainer's log-probabilities differ by {gap.mean_abs:.2g} a token on average"
    beyond = ", beyond bfloat16's rounding," if evidence.dtype == "bfloat16" else ""
    if largest is None:
        return f"{apart}, and no cause that the doctor knows{beyond} explains a quarter of it."
    return (
        f"{apart}, and the largest cause{beyond} is {_name(largest, evidence)}, {largest.share:.0%} of it: "
        f"{largest.evidence}."
    )


def _name(cause: Cause, evidence: Evidence) -> str:
    if cause.name == ROUTING and evidence.routing == "live":
        return "the routing (the engine's experts are not replayed)"
    if cause.name == ROUTING:
        return "the routing (the replayed experts are not those that the engine computed with)"
    if cause.name == PRECISION:
        return "the precision (the engine rounds as bfloat16 does)"
    return {WEIGHTS: "that the weights differ", "staleness": "staleness"}.get(cause.name, f"the {cause.name}")


def _notes(evidence: Evidence, samples: KeptSamples, agrees: bool) -> list[str]:
    notes: list[str] = []
    replay, live = (reading_name(evidence.dtype, routing) for routing in ("replay", "live"))
    if replay in evidence.readings:
        notes.append(
            f"Routing replay: a mean gap of {evidence.gap(live):.2g} without it, {evidence.gap(replay):.2g} with it."
        )
    else:
        notes.append(
            "The engine recorded no routes, so nothing could be replayed: sample anew with --fresh to have them."
        )
    if evidence.engine.garbled:
        first = ", ".join(map(str, evidence.engine.garbled[:5]))
        notes.append(
            f"{len(evidence.engine.garbled)} of {evidence.engine.num_trajectories} trajectories have tokens that do "
            f"not decode to the text that the engine gave: {first}."
        )
    if samples.top_p < 1:
        notes.append(
            f"top_p={samples.top_p:g}: the engine renormalises over the tokens that it keeps, the trainer over all, so "
            "the engine's log-probabilities are higher by design."
        )
    if not agrees and evidence.stale_L.any():
        notes.append("Stale tokens are expected to differ: the policy has been updated since.")
    return notes
