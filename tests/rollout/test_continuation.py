"""A sample that is cut off and taken up again is one sample: nothing twice, nothing lost."""

import msgspec
import numpy as np

from beamline.protocol.blobs import VersionSpan
from beamline.protocol.messages import FinishReason
from beamline.rollout.continuation import Part, Sample, part_seed
from rollout_messages import prompt_group

PROMPT = [1, 2, 3]


def rows(num_rows: int, value: int) -> np.ndarray:
    return np.full((num_rows, 2, 1), value, np.uint8)


def part(tokens: list[int], version: int, reason: FinishReason, *, before: int = 0) -> Part:
    """Of a request that had `before` sampled tokens in its prompt."""
    return Part(
        tokens=tokens,
        logprobs=[-float(token) for token in tokens],
        finish_reason=reason,
        version_spans=[VersionSpan(version, 0, len(tokens))] if tokens else [],
        routed_experts=rows(len(PROMPT) + before + len(tokens) - 1, version) if tokens else None,
    )


def cut(sample: Sample, one: Part) -> None:
    sample.continues = True
    sample.add(one)
    assert not sample.has_ended


def sample_of(max_tokens: int = 20) -> Sample:
    return Sample(prompt_group(PROMPT, seeds=[9], max_tokens=max_tokens), 9)


def test_one_request_is_the_sample() -> None:
    sample = sample_of()
    assert (sample.prompt, sample.max_tokens, sample.seed) == (PROMPT, 20, 9)
    sample.add(part([5, 6], 1, FinishReason.STOP))
    assert sample.has_ended and sample.finish_reason is FinishReason.STOP
    assert sample.tokens == [5, 6] and sample.version_spans == [VersionSpan(1, 0, 2)]


def test_parts_are_joined_and_each_row_is_of_the_forward_that_had_it_first() -> None:
    sample = sample_of()
    cut(sample, part([5, 6], 1, FinishReason.ABORT))
    assert (sample.prompt, sample.max_tokens) == ([*PROMPT, 5, 6], 18)
    cut(sample, part([7], 2, FinishReason.ABORT, before=2))
    sample.add(part([8, 4], 2, FinishReason.LENGTH, before=3))
    assert sample.finish_reason is FinishReason.LENGTH and sample.tokens == [5, 6, 7, 8, 4]
    assert sample.logprobs == [-5.0, -6.0, -7.0, -8.0, -4.0]
    assert sample.version_spans == [VersionSpan(1, 0, 2), VersionSpan(2, 2, 5)]
    assert sample.routed_experts is not None
    assert sample.routed_experts[:, 0, 0].tolist() == [1] * 4 + [2] * 3


def test_a_request_that_was_cut_before_its_first_token_leaves_nothing() -> None:
    sample = sample_of()
    cut(sample, part([], 1, FinishReason.ABORT))
    assert (sample.prompt, sample.seed) == (PROMPT, 9)
    sample.add(part([5], 2, FinishReason.STOP))
    assert sample.tokens == [5] and sample.routed_experts is not None
    assert np.array_equal(sample.routed_experts, rows(3, 2))


def test_what_ended_by_itself_just_before_the_cut_stays_ended() -> None:
    sample = sample_of()
    sample.continues = True
    sample.add(part([5], 1, FinishReason.STOP))
    assert sample.has_ended and sample.finish_reason is FinishReason.STOP


def test_a_sample_that_is_told_to_stop_is_not_taken_up_again() -> None:
    sample = sample_of()
    sample.continues = True
    sample.stop()
    sample.add(part([5], 1, FinishReason.ABORT))
    assert sample.has_ended and sample.finish_reason is FinishReason.ABORT


def test_routes_that_are_not_recorded_stay_so() -> None:
    sample = sample_of()
    cut(sample, msgspec.structs.replace(part([5], 1, FinishReason.ABORT), routed_experts=None))
    sample.add(msgspec.structs.replace(part([6], 2, FinishReason.STOP, before=1), routed_experts=None))
    assert sample.tokens == [5, 6] and sample.routed_experts is None


def test_no_part_repeats_the_draws_of_another() -> None:
    seeds = [part_seed(seed, index) for seed in range(100) for index in range(5)]
    assert len(set(seeds)) == 500 and all(0 <= seed < 2**31 for seed in seeds)
    assert [part_seed(seed, 0) for seed in range(100)] == list(range(100))
