"""A model with adapters merged into its weights, file by file: W + alpha / rank B A in the place of every adapted W.

Worked out in float64, so that it does not show in which order a library adds up, and then rounded to the type that the
weight is stored in. Names, types, shapes, shards and index are the model's own, and what has no adapter is copied. A
few rows of one tensor are in memory at a time.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from beamline.protocol.adapter import Adapter, adapters_of
from beamline.protocol.errors import WeightError
from beamline.protocol.lora_config import LoraSection
from beamline.runtime.adapter_files import AdapterFiles
from beamline.runtime.checkpoint_manifest import Advance
from beamline.runtime.tensor_file import FLOATS, Stored, TensorFile, narrowed

INDEX = "model.safetensors.index.json"
BLOCK_ELEMENTS = 1 << 22
"""Of a weight, in one go."""
_COPY_BYTES = 16 * 1024 * 1024
_WEIGHT = ".weight"


def merge(
    base: Path, adapters: Sequence[Adapter], source: Path, target: Path, advance: Advance = lambda _: None
) -> None:
    """Write the merged weights, and their index where the model has one, into a directory that is there.

    Args:
        base: Hugging Face directory of the model.
        adapters: all that there have to be.
        source: directory of them, in PEFT's format.
        advance: told of the bytes of the model that are done; what it raises stops the work.

    Raises:
        WeightError: a file is damaged; a tensor is missing, or of another shape; a value of an adapter is not finite.
        OSError: the disk is full, or fails.
    """
    files = AdapterFiles(source)
    files.check(adapters)
    missing = {f"{adapter.module}{_WEIGHT}": adapter for adapter in adapters}
    for path in sorted(base.glob("*.safetensors")):
        weights = TensorFile(path)
        inside = {name: missing.pop(name) for name in list(missing) if name in weights.tensors}
        _merge_file(weights, inside, files, target / path.name, advance)
    if missing:
        raise WeightError(f"{base} has no tensor {next(iter(missing))}, to which an adapter in {source} belongs")
    if (base / INDEX).is_file():
        shutil.copyfile(base / INDEX, target / INDEX)


def adapters_in(base: Path, lora: LoraSection) -> list[Adapter]:
    """All adapters that a model has with these settings.

    Raises:
        ConfigError: the model has no layers for them.
        WeightError: a damaged file.
    """
    shapes = {
        name: stored.shape
        for path in sorted(base.glob("*.safetensors"))
        for name, stored in TensorFile(path).tensors.items()
    }
    config = json.loads((base / "config.json").read_bytes())
    return adapters_of(shapes, lora, config["num_experts_per_tok"] if config.get("num_experts") else 0)


def _merge_file(
    weights: TensorFile, adapters: Mapping[str, Adapter], files: AdapterFiles, target: Path, advance: Advance
) -> None:
    with target.open("wb") as file:
        file.write(weights.header)
        for name, stored in sorted(weights.tensors.items(), key=lambda item: item[1].first_byte):
            if file.tell() != stored.first_byte:
                raise WeightError(f"{weights.path} has a gap before tensor {name}: it is damaged")
            adapter = adapters.get(name)
            blocks = _merged(weights, name, adapter, files) if adapter else _copied(weights, stored)
            for block in blocks:
                file.write(block)
                advance(len(block))


def _copied(weights: TensorFile, stored: Stored) -> Iterator[memoryview]:
    end = stored.first_byte + stored.num_bytes
    for at in range(stored.first_byte, end, _COPY_BYTES):
        yield memoryview(weights.raw(at, min(_COPY_BYTES, end - at)))


def _merged(weights: TensorFile, name: str, adapter: Adapter, files: AdapterFiles) -> Iterator[memoryview]:
    stored = weights.tensors[name]
    if stored.dtype not in FLOATS.values() or stored.shape != (adapter.out_features, adapter.in_features):
        raise WeightError(
            f"tensor {name} in {weights.path} is {stored.dtype} {list(stored.shape)}, expected floats of shape "
            f"{[adapter.out_features, adapter.in_features]}: it is of another model than its adapter"
        )
    a, b = files.read(adapter.a).astype(np.float64), files.read(adapter.b).astype(np.float64) * adapter.scale
    num_rows = max(1, BLOCK_ELEMENTS // max(1, adapter.in_features))
    for first in range(0, adapter.out_features, num_rows):
        rows = slice(first, min(first + num_rows, adapter.out_features))
        values = weights.read(name, rows) + b[rows] @ a
        yield narrowed(values, stored.dtype).reshape(-1).view(np.uint8).data
