"""The benchmark's reward: it differs between the samples of a group, even of a model that knows nothing."""


def distinct_characters(completion: str) -> float:
    """Tenths of the number of different characters."""
    return len(set(completion)) / 10
