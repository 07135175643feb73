"""The bookkeeping of a trajectory of several turns, worked out by hand.

Two prompt tokens; a turn of three; an observation of two; a turn of two. Row r of a turn's trace holds 10 * turn + r.
"""

import numpy as np

from beamline.protocol.blobs import VersionSpan
from beamline.protocol.messages import FinishReason
from beamline.rollout.engine import Completion
from beamline.rollout.transcript import Transcript


def trace(turn: int, num_rows: int) -> np.ndarray:
    return 10 * turn + np.arange(num_rows, dtype=np.uint8)[:, None, None]


def sampled(tokens: list[int], version: int, text: str, routes: np.ndarray | None) -> Completion:
    return Completion(
        tokens=tokens,
        logprobs=[-token / 10 for token in tokens],
        finish_reason=FinishReason.STOP,
        text=text,
        version_spans=[VersionSpan(version, 0, len(tokens))],
        routed_experts=routes,
    )


def two_turns() -> Transcript:
    transcript = Transcript([1, 2])
    transcript.add(sampled([3, 4, 5], 7, "a+b=", trace(1, 4)))
    transcript.observe([8, 9], "c ")
    transcript.add(sampled([6, 7], 8, "end", trace(2, 8)))
    return transcript


def test_what_was_sampled_and_what_was_observed() -> None:
    completion = two_turns().completion(FinishReason.STOP, 0.5)
    assert completion.tokens == [3, 4, 5, 8, 9, 6, 7]
    assert completion.loss_mask == [True, True, True, False, False, True, True]
    assert completion.logprobs == [-0.3, -0.4, -0.5, 0.0, 0.0, -0.6, -0.7]
    assert completion.version_spans == [VersionSpan(7, 0, 3), VersionSpan(8, 5, 7)]
    assert completion.text == "a+b=c end"
    assert (completion.finish_reason, completion.environment_reward) == (FinishReason.STOP, 0.5)


def test_a_row_once_had_stays_and_an_observations_rows_are_those_of_the_next_turn() -> None:
    """Nine tokens, so eight rows: the first turn's four, then the second's from its fifth on."""
    routes = two_turns().completion(FinishReason.STOP, 0.0).routed_experts
    assert routes is not None
    assert routes.ravel().tolist() == [10, 11, 12, 13, 24, 25, 26, 27]


def test_the_next_turn_follows_every_token_as_it_was() -> None:
    transcript = Transcript([1, 2])
    assert transcript.tokens == [1, 2]
    transcript.observe([30], "first")
    assert (transcript.tokens, transcript.num_response_tokens) == ([1, 2, 30], 1)
    transcript.add(sampled([3], 7, "a", None))
    transcript.observe([8, 9], "c")
    assert (transcript.tokens, transcript.num_response_tokens) == ([1, 2, 30, 3, 8, 9], 4)


def test_an_observation_that_no_turn_follows_is_left_out() -> None:
    transcript = two_turns()
    transcript.observe([40, 41], "never read")
    transcript.add(sampled([], 9, "", None))
    completion = transcript.completion(FinishReason.ABORT, 0.0)
    assert completion.tokens == [3, 4, 5, 8, 9, 6, 7]
    assert completion.text == "a+b=c end"
    assert completion.routed_experts is not None and len(completion.routed_experts) == 8


def test_without_any_turn_there_is_nothing() -> None:
    transcript = Transcript([1, 2])
    transcript.observe([8], "c")
    completion = transcript.completion(FinishReason.ENVIRONMENT, 0.0)
    assert (completion.tokens, completion.loss_mask, completion.version_spans, completion.text) == ([], [], [], "")
    assert completion.routed_experts is None


def test_rows_that_one_turn_lacks_are_missing_altogether() -> None:
    transcript = Transcript([1, 2])
    transcript.add(sampled([3], 7, "a", trace(1, 2)))
    transcript.add(sampled([4], 7, "b", None))
    assert transcript.completion(FinishReason.STOP, 0.0).routed_experts is None
