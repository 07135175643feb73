"""One of two ranks that share the vocabulary: `python trainer_head_rank.py DIR NUM_ROWS PORT RANK`.

Writes `<DIR>/<RANK>.safetensors`: of every case logprobs, entropy, and the gradients of hidden states and of this
rank's half of the weights, as `<case>.<name>`.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from beamline.trainer.megatron import distributed
from beamline.trainer.megatron import head as heads
from beamline.trainer.megatron.distributed import Layout, Ranks
from beamline.trainer.megatron.head import logprobs_and_entropy
from trainer_head_cases import CASES, NUM_ENTRIES, Tensors, inputs

WORLD_SIZE = 2


def main() -> None:
    directory, num_rows, port, rank = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    heads.CHUNK_ROWS, heads.TILE_BYTES = 10, 10 * 7 * 4
    distributed.start(Ranks(rank, WORLD_SIZE, port), Layout(tensor=WORLD_SIZE))
    found = Tensors()
    for name, head in CASES.items():
        size = NUM_ENTRIES // WORLD_SIZE
        given = inputs(num_rows)
        weight = given["weight"].detach()[rank * size : (rank + 1) * size].clone().requires_grad_()
        own = replace(head, vocab_start=rank * size, group=torch.distributed.group.WORLD)
        outputs = logprobs_and_entropy(given["hidden"], weight, given["targets"], own)
        torch.autograd.backward(outputs, (given["grad.logprobs"], given["grad.entropy"]))
        results = (*outputs, given["hidden"].grad, weight.grad)
        for part, tensor in zip(("logprobs", "entropy", "hidden", "weight"), results, strict=True):
            assert tensor is not None
            found[f"{name}.{part}"] = tensor.detach()
    save_file(found, directory / f"{rank}.safetensors")
    distributed.stop()


if __name__ == "__main__":
    main()
