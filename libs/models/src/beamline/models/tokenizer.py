"""The tiny models' tokenizer: byte-level BPE of 512 tokens, one token a digit, and its chat template.

Any text has tokens, since every byte has one. `train` makes the tokenizer, the same each time; the
result is kept in `assets/tokenizer` so that no version of the library can change it.
"""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from beamline.models import chained_sums

VOCAB_SIZE = 512
REASONING_EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
PAD, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, START_OF_TURN, END_OF_TURN, *(f"<|effort_{effort}|>" for effort in REASONING_EFFORTS))
PAD_ID, END_OF_TURN_ID = 0, 2

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
ASSETS = Path(__file__).parent / "assets" / "tokenizer"
NUM_TRAINING_PROBLEMS = 2_000
TRAINING_SEED = 0
PROSE_REPEATS = 4
# Common words and mathematical notation, for prompts other than chained sums.
PROSE = r"""
A shop sells pens for 3 dollars each and notebooks for 5 dollars each. How much does she pay for all of them?
He has twice as many apples as his sister. If they eat some each day, how many are left after a week?
Let $x$ and $y$ be positive integers such that $x^2 + y^2 = 25$. Find the sum of all possible values of $x + y$.
What is the total number of minutes in two hours? There are sixty minutes in one hour, so the answer is 120.
Suppose that $f(x) = \frac{1}{x}$ and $\sqrt{x} \le 4$. Determine the remainder when the product is divided by 7.
The triangle $ABC$ has sides of length 3, 4 and 5; its area is $\boxed{6}$. Then the probability is $\frac{m}{n}$.
Each of the first three people gives one half of the money to the others, which makes the average price higher.
Show your reasoning, then write the final answer on the last line of your response in the form Answer: $Answer.
"""


def write(directory: Path) -> None:
    """Copy the tokenizer's files and the chat template into `directory`."""
    for name in FILES:
        shutil.copyfile(ASSETS / name, directory / name)


def train() -> Tokenizer:
    """Make the tokenizer anew from generated solutions and `PROSE`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    return tokenizer


def _training_text() -> Iterator[str]:
    generator = random.Random(TRAINING_SEED)
    for _ in range(NUM_TRAINING_PROBLEMS):
        problem = chained_sums.draw_problem(generator)
        yield f"user\n{problem.prompt}\nassistant\n{chained_sums.solve(problem)}\nsystem\n"
    for _ in range(PROSE_REPEATS):
        yield from PROSE.strip().splitlines()
