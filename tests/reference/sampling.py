"""Sampling and grading chained sums with transformers' own models: batched, seeded, on one CPU thread."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from beamline.models import tokenizer
from beamline.models.chained_sums import Problem
from beamline.models.chat import ChatTokenizer

MAX_NEW_TOKENS = 56
BATCH_SIZE = 512
ANSWER = re.compile(r"Answer: (-?\d+)\s*$")


@dataclass(frozen=True)
class Accuracy:
    """Shares of right answers: the mean over samples at temperature 1, and of the most likely response."""

    average: float
    greedy: float
    mean_length: float


def prompt_ids(chat: ChatTokenizer, problem: Problem) -> list[int]:
    return chat.encode_chat([{"role": "user", "content": problem.prompt}])


@torch.no_grad()
def complete(
    model, prompts: Sequence[list[int]], temperature: float, max_new_tokens: int = MAX_NEW_TOKENS
) -> list[list[int]]:
    """A completion for each prompt, ended by (and including) the end of turn where it came in time.

    temperature 0 is greedy. Randomness comes from torch's global generator.
    """
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[tokenizer.PAD_ID] * (longest - len(p)) + p for p in prompts])
    attention_mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature
        else {"do_sample": False}
    )
    output = model.generate(
        input_ids=input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.END_OF_TURN_ID,
        pad_token_id=tokenizer.PAD_ID,
        **sampling,
    )
    return [_until_end(row) for row in output[:, longest:].tolist()]


def is_right(chat: ChatTokenizer, problem: Problem, completion: list[int]) -> bool:
    """Whether the completion ends in time and its last line gives the answer."""
    match = ANSWER.search(chat.decode(completion))
    return completion[-1] == tokenizer.END_OF_TURN_ID and match is not None and int(match[1]) == problem.answer


def measure(model, chat: ChatTokenizer, problems: Sequence[Problem], num_samples: int) -> Accuracy:
    """Accuracy of a model on `problems`, `num_samples` each beside one greedy completion."""
    prompts = [prompt_ids(chat, problem) for problem in problems]
    sampled = list(zip(problems * num_samples, _batches(model, prompts * num_samples, 1.0), strict=True))
    greedy = list(zip(problems, _batches(model, prompts, 0.0), strict=True))
    return Accuracy(
        average=sum(is_right(chat, *pair) for pair in sampled) / len(sampled),
        greedy=sum(is_right(chat, *pair) for pair in greedy) / len(greedy),
        mean_length=sum(len(completion) for _, completion in sampled) / len(sampled),
    )


def _batches(model, prompts: list[list[int]], temperature: float) -> list[list[int]]:
    return [
        completion
        for first in range(0, len(prompts), BATCH_SIZE)
        for completion in complete(model, prompts[first : first + BATCH_SIZE], temperature)
    ]


def _until_end(row: list[int]) -> list[int]:
    return row[: row.index(tokenizer.END_OF_TURN_ID) + 1] if tokenizer.END_OF_TURN_ID in row else row
