"""The data cursor: prompts in an order that the seed fixes, resumable at any position.

A position counts the rows drawn since the run's start, the dropped ones included. It is all that a coordinator has to
remember: order and epoch follow from it and the seed.
"""

import random
from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import blake2b

import msgspec

from beamline.coordinator.resume_files import DataIdentity
from beamline.protocol.errors import ConfigError


class Prompt(msgspec.Struct, frozen=True):
    """A row of a data set, as it is sampled and graded."""

    prompt_id: str
    data_source: str
    ground_truth: str
    tokens: list[int]
    text: str = ""
    """The last message as a person reads it, for dumps and reports."""


class Problems(msgspec.Struct, frozen=True):
    """What is evaluated under one name."""

    prompts: list[Prompt]
    num_dropped: int = 0
    """Left out as too long."""


class DataCursor:
    """Draws prompts for ever; every epoch is a new shuffle of the same seed. Too long prompts are dropped.

    Args:
        rows: the data set.
        tokenize: makes a Prompt of a row; called when the row is drawn.
        max_prompt_tokens: longer prompts are dropped; the position moves past them.
        seed: of the shuffle; None keeps the file's order.
        source: the file, for messages.
    """

    def __init__[Row](
        self,
        rows: Sequence[Row],
        tokenize: Callable[[Row], Prompt],
        *,
        max_prompt_tokens: int,
        seed: int | None,
        source: str,
    ) -> None:
        if not rows:
            raise ConfigError(f"data.train={source}: the file has no rows")
        self._rows = rows
        self._tokenize = tokenize
        self._max_prompt_tokens = max_prompt_tokens
        self._seed = seed
        self._source = source
        self._order: list[int] = []
        self._epoch = -1

    @cached_property
    def identity(self) -> DataIdentity:
        """Of the rows and their order. Reads all rows once: seconds for a million."""
        digest = blake2b(digest_size=16)
        for row in self._rows:
            digest.update(msgspec.json.encode(row, enc_hook=repr) + b"\n")
        return DataIdentity(
            source=self._source, num_rows=len(self._rows), rows_hash=digest.hexdigest(), seed=self._seed
        )

    def draw(self, position: int) -> tuple[Prompt, int]:
        """The first prompt at or after `position`, and the position after it.

        Raises:
            ConfigError: no prompt of a whole epoch is short enough.
        """
        for drawn in range(position, position + len(self._rows)):
            prompt = self._tokenize(self._rows[self._index(drawn)])
            if len(prompt.tokens) <= self._max_prompt_tokens:
                return prompt, drawn + 1
        raise ConfigError(
            f"data.max_prompt_tokens={self._max_prompt_tokens}: every prompt of {self._source} is longer; raise it"
        )

    def epoch(self, position: int) -> float:
        """How often the data set has been drawn, such as 1.5 in the middle of the second epoch."""
        return position / len(self._rows)

    def _index(self, position: int) -> int:
        epoch, row = divmod(position, len(self._rows))
        if epoch != self._epoch:
            self._order = list(range(len(self._rows)))
            if self._seed is not None:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[row]
