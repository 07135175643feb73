"""Texts that end a sample, found where tokens are made.

vLLM looks for them in the service's process, a token at a time; here a request leaves the engine core only when it has
ended, so the core has to find them itself.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

EXTRA_ARG = "beamline_stop"
"""Key of the texts among a request's extra arguments."""


class StopTexts:
    """Finds texts at the end of what was sampled.

    Args:
        tokenizer: path of a tokenizer.json.
    """

    def __init__(self, tokenizer: Path) -> None:
        self._path = tokenizer
        self._tokenizer: Tokenizer | None = None

    def end(self, tokens: Sequence[int], texts: Sequence[str]) -> bool:
        """Whether one of the texts has just been completed by the last token, which may write more than its end."""
        if not texts:
            return False
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(str(self._path))
        # A token writes at least a byte; what begins before these was looked at with an earlier token.
        num_tokens = max(len(text.encode()) for text in texts)
        tail = self._tokenizer.decode(list(tokens[-num_tokens:]), skip_special_tokens=False)
        return any(text in tail for text in texts)
