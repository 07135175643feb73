"""Seeds of samples: fixed by the run's seed and by what is sampled, independent of when and where."""

import hashlib


def sample_seed(run_seed: int, name: str, sample: int) -> int:
    """A seed in [0, 2^31) for one sample of a group."""
    digest = hashlib.blake2b(f"{run_seed}/{name}/{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
