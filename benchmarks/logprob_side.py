"""One side of `benchmarks.fused_logprob`: log-probabilities of 4,096 tokens, forward and backward, once.

    bin/python trainer -m benchmarks.logprob_side --side fused --out FILE

Runs in the trainer's environment. The peak is what the process ever held above what it held when its inputs were there
and the libraries warm: intermediate matrices, and the gradients of hidden states and weights on both sides alike.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

from beamline.trainer.megatron.head import Head, logprobs_and_entropy

SHAPE = (4096, 151_936, 1024)
"""Tokens, vocabulary entries, hidden size."""
WARM_UP = (64, 2048, 1024)
SOFTCAP, TEMPERATURE = 30.0, 0.7


def plain(hidden_LX: Tensor, weight_VX: Tensor, targets_L: Tensor) -> Tensor:
    """As one writes it with torch."""
    logits = hidden_LX @ weight_VX.t()
    logits = SOFTCAP * torch.tanh(logits / SOFTCAP)
    return (logits / TEMPERATURE).log_softmax(-1).gather(1, targets_L[:, None])[:, 0]


def fused(hidden_LX: Tensor, weight_VX: Tensor, targets_L: Tensor) -> Tensor:
    """The trainer's, which finds the entropy too."""
    return logprobs_and_entropy(hidden_LX, weight_VX, targets_L, Head(TEMPERATURE, SOFTCAP))[0]


SIDES = {"plain": plain, "fused": fused}


def inputs(num_tokens: int, num_entries: int, hidden_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weights, targets and the log-probabilities' gradient; logits have a deviation of about one."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator)
    weight = torch.randn(num_entries, hidden_size, generator=generator).mul_(hidden_size**-0.5)
    targets = torch.randint(num_entries, (num_tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, torch.randn(num_tokens, generator=generator)


def run(side: str) -> dict[str, float]:
    """Seconds and bytes of one forward and backward, and what came out of it, so that both sides can be compared."""
    compute = SIDES[side]
    *warm, grad = inputs(*WARM_UP)
    compute(*warm).backward(grad)
    hidden, weight, targets, grad = inputs(*SHAPE)
    before = resident_bytes("VmRSS")
    processor, begin = time.process_time(), time.perf_counter()
    logprobs = compute(hidden, weight, targets)
    middle = time.perf_counter()
    logprobs.backward(grad)
    end, processor = time.perf_counter(), time.process_time() - processor
    peak = resident_bytes("VmHWM")
    assert hidden.grad is not None and weight.grad is not None
    return {
        "forward_s": middle - begin,
        "backward_s": end - middle,
        "processor_s": processor,
        "peak_bytes": peak - before,
        "mean_logprob": logprobs.double().mean().item(),
        "hidden_gradient_norm": hidden.grad.double().norm().item(),
        "weight_gradient_norm": weight.grad.norm(dtype=torch.float64).item(),
    }


def resident_bytes(kind: str) -> int:
    """VmRSS: now; VmHWM: the most there ever was."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", required=True, choices=SIDES)
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    Path(options.out).write_text(json.dumps(run(options.side), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
