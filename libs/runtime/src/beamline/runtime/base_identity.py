"""Which weights a Hugging Face directory holds, without reading all of them."""

from pathlib import Path

import msgspec
import xxhash

from beamline.protocol.errors import WeightError

NUM_SAMPLES = 64
SAMPLE_BYTES = 4096
"""Of each file this much is read at so many places, which lie evenly over it; a small file is read whole."""


class BaseIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint of adapters remembers of the model beneath them."""

    path: str
    """Where it lay, which may change."""
    index_xxh3_128: str
    """Of every file's name, size, header (names, types, shapes) and samples."""

    @classmethod
    def of(cls, model_dir: Path) -> "BaseIdentity":
        """Raises WeightError for a directory without weights, or with a damaged file."""
        from beamline.runtime.tensor_file import TensorFile  # brings numpy, which a service's start must not wait for

        digest = xxhash.xxh3_128()
        paths = sorted(model_dir.glob("*.safetensors"))
        if not paths:
            raise WeightError(f"{model_dir} has no *.safetensors file: it holds no model")
        for path in paths:
            file, size = TensorFile(path), path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode() + file.header)
            first, last = len(file.header), max(len(file.header), size - SAMPLE_BYTES)
            for at in sorted({first + (last - first) * n // (NUM_SAMPLES - 1) for n in range(NUM_SAMPLES)}):
                digest.update(file.raw(at, min(SAMPLE_BYTES, size - at)))
        return cls(path=str(model_dir.resolve()), index_xxh3_128=digest.hexdigest())

    def is_of(self, other: "BaseIdentity") -> bool:
        """Whether the weights are the same, wherever they lie."""
        return self.index_xxh3_128 == other.index_xxh3_128
