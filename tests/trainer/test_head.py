"""The head's log-probabilities, entropies and their gradients, against torch's autograd on the whole matrix."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from beamline.trainer.megatron import head as heads
from beamline.trainer.megatron.head import Head, logprobs_and_entropy

ROWS, VOCAB, HIDDEN = 37, 50, 16


def inputs(scale: float = 1.5) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator) * scale
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    targets = torch.randint(VOCAB, (ROWS,), generator=generator)
    return hidden, weight, targets, *torch.randn(2, ROWS, generator=generator)


def expected(hidden: Tensor, weight: Tensor, targets: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """In float64, as Beam's head is defined."""
    logits = hidden.double() @ weight.double().t()
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logprobs = (logits / head.temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def gradients(
    outputs: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor], leaves: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    total = sum((output * grad).sum() for output, grad in zip(outputs, grads, strict=True))
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradients_are_those_of_autograd(softcap: float | None, temperature: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heads, "CHUNK_ROWS", 10)
    head = Head(temperature, softcap, entropy_gradient=True)
    hidden, weight, targets, *grads = inputs()
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    found, wanted = (f(hidden, weight, targets, head) for f in (logprobs_and_entropy, expected))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=5e-5)
    ours, theirs = (gradients(outputs, tuple(grads), leaves) for outputs in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_entropy_has_no_gradient_unless_it_is_asked_for():
    hidden, weight, targets, *_ = inputs()
    plain = Head(1.0)
    logprobs, entropy = logprobs_and_entropy(hidden.requires_grad_(), weight.requires_grad_(), targets, plain)
    assert logprobs.requires_grad and not entropy.requires_grad
    asked = logprobs_and_entropy(hidden, weight, targets, replace(plain, entropy_gradient=True))
    ours, theirs = (torch.autograd.grad(out.sum(), (hidden, weight)) for out in (asked[0], logprobs))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_certain_token_and_of_an_even_distribution_is_zero():
    """Entropy is largest where all scores are equal, and flat where one token has all the probability."""
    head = Head(1.0, entropy_gradient=True)
    hidden = torch.tensor([[0.0, 0.0], [300.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    _, entropy = logprobs_and_entropy(hidden, weight, torch.tensor([0, 0]), head)
    assert entropy.tolist() == pytest.approx([torch.log(torch.tensor(3.0)).item(), 0.0], abs=1e-6)
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-7)
