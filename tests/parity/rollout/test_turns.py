"""Trajectories of several turns on a real engine: what it noted of each turn is what reading the whole text gives."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from beamline.environments.host import EnvironmentPool
from beamline.models.chat import ChatTokenizer
from beamline.protocol.messages import FinishReason, PromptGroup
from beamline.rollout.turns import Turns
from rollout_messages import prompt_group
from tiny_engines import routes_of

ENVIRONMENT = "planted_environments:Vowels"
NUM_TURNS, MAX_TOKENS = 4, 150

pytestmark = pytest.mark.asyncio(loop_scope="session")


def stopped_by(group: PromptGroup, *texts: str) -> PromptGroup:
    return msgspec.structs.replace(group, sampling=msgspec.structs.replace(group.sampling, stop=list(texts)))


async def test_a_sample_ends_with_the_token_that_completes_a_stop_text(engine, model) -> None:
    """A text over two tokens, and one within one; what was sampled up to there does not change."""
    group = prompt_group(model.reference["tokens"][0][:40].tolist(), seeds=[1, 2], max_tokens=60)
    tokenizer = ChatTokenizer.load(model.path)
    for whole, index in zip(await engine.generate(group), range(2), strict=True):
        pieces = [tokenizer.decode([token]) for token in whole.tokens]
        at = next(i for i in range(20, 60) if all(p and "\ufffd" not in p for p in pieces[i - 1 : i + 1]))
        text = pieces[at - 1] + pieces[at]
        end = next(i for i in range(1, 60) if text in tokenizer.decode(whole.tokens[: i + 1])) + 1
        cut = (await engine.generate(stopped_by(group, "no such text", text)))[index]
        assert (cut.tokens, cut.finish_reason) == (whole.tokens[:end], FinishReason.STOP)
        assert cut.logprobs == pytest.approx(whole.logprobs[:end], abs=1e-5)
        assert cut.text.endswith(text) and len(routes_of(cut)) == 40 + end - 1


async def test_turns_are_as_if_the_whole_text_had_been_read_at_once(engine, model, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support"))
    chat = ChatTokenizer.load(model.path)
    pool = EnvironmentPool(ENVIRONMENT, num_workers=1, timeout_s=30.0, memory_bytes=1 << 30)
    turns = Turns(engine, pool, chat, template_kwargs={}, max_turns=NUM_TURNS)
    group = prompt_group(model.reference["tokens"][1][:40].tolist(), seeds=[1, 2, 3, 4], max_tokens=MAX_TOKENS)
    group = msgspec.structs.replace(group, task=msgspec.structs.replace(group.task, environment=ENVIRONMENT))
    try:
        completions = await turns.generate(group)
    finally:
        await pool.close()
    await engine.forget_prefixes()  # what is read now is computed anew
    observed = 0
    for completion in completions:
        sampled = np.array(completion.loss_mask)
        observed += (~sampled).sum()
        sequence = [*group.prompt_tokens, *completion.tokens]
        scored = np.array(await engine.score(sequence))[len(group.prompt_tokens) - 1 :]
        assert np.abs(scored - completion.logprobs)[sampled].max() < 1e-4
        (read,) = await engine.generate(prompt_group(sequence[:-1], seeds=[1], max_tokens=1))
        assert np.array_equal(routes_of(completion), routes_of(read))
    assert observed > 0, "no turn was answered"
