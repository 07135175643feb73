"""Adapters exported from checkpoints as a user does it, right ones and wrong ones.

    coordinator-python lora_exports.py DIR

For each model NAME of MODELS and each case CASE: `<DIR>/NAME/CASE/base` is the model, `checkpoints` are those of the
adapters, `adapter` and `merged` what comes of `beamline export` without and with `--merge`. Cases are the kinds of
adapters in `lora_variants`, and of the kind PLANTED: `bfloat16`, a model of that type; `scale`, experts' adapters that
are too small by the number of experts a token; `permuted`, each expert with the adapters of the next.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from adapter_checkpoints import adapters_with, make_adapter_checkpoint
from beamline.models import tiny
from beamline.runtime.export import export, export_merged
from lora_variants import ALL
from made_adapters import made

MODELS = ("tiny-beam", "tiny-qwen3-moe")
PLANTED = "norm-alpha2"
SEED = 7

type Tensors = dict[str, np.ndarray]


def main(directory: Path) -> None:
    for name in MODELS:
        for variant in ALL:
            make(directory / name / variant, name, variant)
        make(directory / name / "bfloat16", name, PLANTED, dtype="bfloat16")
        for case, plant in (("scale", scale_off), ("permuted", permuted)):
            make(directory / name / case, name, PLANTED, plant=plant)


def make(
    folder: Path,
    name: str,
    variant: str,
    *,
    dtype: tiny.DType = "float32",
    plant: Callable[[Tensors, str], Tensors] = lambda tensors, _: tensors,
) -> None:
    """One case."""
    tiny.build(tiny.SPECS[name], folder / "base", seed=SEED, randomise=True, dtype=dtype)
    tensors = plant(made(adapters_with(name, ALL[variant])), name)
    checkpoints = folder / "checkpoints"
    make_adapter_checkpoint(checkpoints, 1, folder / "base", name, ALL[variant], tensors)
    export(checkpoints, folder / "adapter")
    export_merged(checkpoints, folder / "merged")


def scale_off(tensors: Tensors, name: str) -> Tensors:
    """As if an expert's adapters had the scale of all others."""
    top_k = np.float32(tiny.SPECS[name].num_experts_per_tok)
    return {
        key: values / top_k if ".experts." in key and "lora_B" in key else values for key, values in tensors.items()
    }


def permuted(tensors: Tensors, name: str) -> Tensors:
    """Every expert has what is the next one's."""

    def source(key: str) -> str:
        before, found, after = key.partition(".experts.")
        number, _, rest = after.partition(".")
        return f"{before}.experts.{(int(number) + 1) % tiny.SPECS[name].num_experts}.{rest}" if found else key

    return {key: tensors[source(key)] for key in tensors}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
