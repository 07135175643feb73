"""The fixed text by which an engine checks that it computes what the trainer computes."""

NUM_TOKENS = 64
_STRIDE, _FIRST = 37, 11


def canary_tokens(vocab_size: int) -> list[int]:
    """Token ids spread over the vocabulary, the same in every run; longer than a tiny model's sliding window."""
    return [(_FIRST + _STRIDE * index) % vocab_size for index in range(NUM_TOKENS)]
