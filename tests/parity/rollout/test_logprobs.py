"""vLLM's Beam and Qwen3-MoE against transformers' own, in fp32, to 1e-4; and what sampling says of itself.

Legend: S reference sequences of T tokens, P positions whose logits are kept, V the vocabulary.
"""

import asyncio

import numpy as np
import pytest

from beamline.protocol import messages as m
from beamline.protocol.errors import Rejected
from rollout_messages import prompt_group

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOLERANCE = 1e-4


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def cuts(model) -> list[tuple[list[int], np.ndarray]]:
    """Every prompt that ends at a kept position, with the reference's logits of the next token."""
    reference = model.reference
    return [
        (tokens[: position + 1].tolist(), logits)
        for tokens, rows in zip(reference["tokens"], reference["logits"], strict=True)
        for position, logits in zip(reference["logits_positions"], rows, strict=True)
    ]


async def test_a_texts_logprobs_equal_transformers(engine, model) -> None:
    scored = [await engine.score(tokens.tolist()) for tokens in model.reference["tokens"]]
    assert np.abs(np.array(scored) - model.reference["logprobs"]).max() < TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_sampled_logprobs_are_the_log_softmax_of_logits_over_temperature(engine, model, temperature) -> None:
    """All prompts at once, twice: chunked prefill, mixed with decoding, then with most of each prompt in the cache."""
    prompts = cuts(model)
    for seeds in ([1, 2, 3], [4, 5]):
        groups = [prompt_group(tokens, seeds=seeds, max_tokens=1, temperature=temperature) for tokens, _ in prompts]
        sampled = await asyncio.gather(*(engine.generate(group) for group in groups))
        for completions, (_, logits) in zip(sampled, prompts, strict=True):
            expected = log_softmax(logits / temperature)
            for completion in completions:
                assert abs(completion.logprobs[0] - expected[completion.tokens[0]]) < TOLERANCE


async def test_greedy_takes_the_reference_argmax(engine, model) -> None:
    for tokens, logits in cuts(model)[::5]:
        (completion,) = await engine.generate(prompt_group(tokens, seeds=[0], max_tokens=1, temperature=0.0))
        assert completion.tokens == [int(logits.argmax())]
        assert abs(completion.logprobs[0] - log_softmax(logits).max()) < TOLERANCE


async def test_top_p_renormalises_over_what_it_keeps(engine, model) -> None:
    top_p = 0.6
    for tokens, logits in cuts(model)[::5]:
        probabilities = np.exp(log_softmax(logits))
        order = probabilities.argsort()[::-1]
        num_kept = int((probabilities[order].cumsum() < top_p).sum()) + 1
        total = probabilities[order[:num_kept]].sum()
        for completion in await engine.generate(prompt_group(tokens, seeds=[1, 2, 3, 4], max_tokens=1, top_p=top_p)):
            assert completion.tokens[0] in order[:num_kept]
            assert abs(completion.logprobs[0] - np.log(probabilities[completion.tokens[0]] / total)) < TOLERANCE


async def test_decoding_agrees_with_scoring_the_whole_text(engine, model) -> None:
    """A long response decodes past the sliding window, token by token; scoring sees it at once and without a cache."""
    prompt = model.reference["tokens"][0][:20].tolist()
    for completion in await engine.generate(prompt_group(prompt, seeds=[1, 2, 3], max_tokens=100)):
        scored = await engine.score(prompt + completion.tokens)
        assert np.abs(np.array(scored[len(prompt) - 1 :]) - completion.logprobs).max() < TOLERANCE


async def test_a_seed_fixes_the_tokens_whatever_else_is_running(engine, model) -> None:
    prompt = model.reference["tokens"][1][:40].tolist()
    alone = await engine.generate(prompt_group(prompt, seeds=[11, 12], max_tokens=30))
    crowd = [prompt_group(prompt[:length], seeds=[1, 2, 3], max_tokens=20) for length in range(5, 25)]
    again, *_ = await asyncio.gather(
        engine.generate(prompt_group(prompt, seeds=[12, 13, 11], max_tokens=30)), *map(engine.generate, crowd)
    )
    assert [again[2].tokens, again[0].tokens] == [completion.tokens for completion in alone]
    assert again[1].tokens not in (again[0].tokens, again[2].tokens)


async def test_responses_end_by_length_or_by_the_end_token_and_have_their_text(engine, model) -> None:
    prompt = model.reference["tokens"][0][:10].tolist()
    completions = await engine.generate(prompt_group(prompt, seeds=list(range(24)), max_tokens=120, temperature=2.0))
    ends = {completion.finish_reason: completion for completion in completions}
    for completion in completions:
        stopped = completion.finish_reason is m.FinishReason.STOP
        assert (len(completion.tokens) == 120) or stopped
        assert len(completion.logprobs) == len(completion.tokens)
        assert completion.version_spans[0].start == 0 and completion.version_spans[-1].end == len(completion.tokens)
    assert set(ends) <= {m.FinishReason.STOP, m.FinishReason.LENGTH}
    assert all(completion.text for completion in completions)


async def test_a_prompt_that_does_not_fit_is_rejected(engine, model) -> None:
    with pytest.raises(Rejected) as rejected:
        await engine.generate(prompt_group([5] * 500, seeds=[1], max_tokens=20))
    assert rejected.value.kind == "prompt_too_long" and "512" in str(rejected.value)
