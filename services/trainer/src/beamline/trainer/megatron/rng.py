"""Random number generators of a rank: torch's, and those that Megatron keeps apart for its regions."""

import logging
from pathlib import Path

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file

log = logging.getLogger(__name__)
_REGION = "region."


def save_rng(folder: Path, rank: int) -> None:
    """Write `rank-N.safetensors`: `cpu`, `cuda` where there is a GPU, and `region.<name>`."""
    states = {f"{_REGION}{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    states["cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    save_file({name: state.cpu().clone() for name, state in states.items()}, folder / _file(rank))


def load_rng(folder: Path, rank: int, world_size: int) -> None:
    """Take over what as many ranks have saved; of another number of ranks nothing, which the log says."""
    num_saved = len(list(folder.glob("rank-*.safetensors")))
    if num_saved != world_size:
        log.warning("random generators of %d ranks do not fit %d: they start from their seeds", num_saved, world_size)
        return
    states = load_file(folder / _file(rank))
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    regions = {name.removeprefix(_REGION): s for name, s in states.items() if name.startswith(_REGION)}
    get_cuda_rng_tracker().set_states(regions)


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
