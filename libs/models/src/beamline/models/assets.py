"""The models that come with the package, and how to lay one out as a Hugging Face directory.

`tiny-beam` and `tiny-qwen3-moe` have been warm-started on chained sums (their bfloat16 weights are kept
here; `tests/reference/warm_start.py` made them); `bench` has random weights.
"""

import shutil
from pathlib import Path

from beamline.models import tiny

DIRECTORY = Path(__file__).parent / "assets"
WARM_STARTED = ("tiny-beam", "tiny-qwen3-moe")
RANDOM_SEED = 0


def weights(name: str) -> Path:
    """The shipped weights of a warm-started model."""
    return DIRECTORY / name / "model.safetensors"


def materialise(name: str, directory: Path) -> Path:
    """Write the model called `name` into `directory` and return it; what lies there is overwritten.

    Raises ValueError for a name that is not one of `tiny.SPECS`.
    """
    if name not in tiny.SPECS:
        raise ValueError(f"no model is called {name!r}: use one of {', '.join(tiny.SPECS)}, or a directory's path")
    if name not in WARM_STARTED:
        tiny.build(tiny.SPECS[name], directory, seed=RANDOM_SEED)
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(weights(name), directory / "model.safetensors")
    tiny.write_description(tiny.SPECS[name], directory, "bfloat16")
    return directory
