"""AdamW over float32 main parameters, its state keyed by parameter name.

A float32 parameter is its own main copy. A bfloat16 one has a float32 copy that owns the gradient too: each
backward pass adds into it and the parameter's own gradient is dropped.
"""

from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from beamline.protocol.errors import WeightError
from beamline.trainer.megatron import gradients
from beamline.trainer.policy import NotFinite

State = dict[str, Tensor]
_KINDS = ("exp_avg", "exp_avg_sq", "step")
_PARALLEL_MARKS = ("sequence_parallel", "tensor_model_parallel")


@dataclass(frozen=True)
class AdamWSettings:
    """Decoupled weight decay (arXiv 1711.05101), on matrices alone."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


class NamedAdamW:
    """The optimizer of one rank's parameters."""

    def __init__(self, module: nn.Module, groups: ProcessGroupCollection, settings: AdamWSettings) -> None:
        self._groups = groups
        self._settings = settings
        self._parameters = dict(module.named_parameters())
        self._main = {name: _main_copy(parameter) for name, parameter in self._parameters.items()}
        decayed = [main for main in self._main.values() if main.dim() > 1]
        others = [main for main in self._main.values() if main.dim() <= 1]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

    def step(self, lr: float) -> float:
        """Sum gradients over the ranks, clip their norm, update, clear; returns the norm before clipping.

        Raises NotFinite before anything changed, but for the gradients, which are cleared.
        """
        named = list(self._main.items())
        gradients.sum_over_ranks(named, self._groups)
        norm = gradients.norm(named, self._groups)
        if not norm < float("inf"):
            self.clear()
            raise NotFinite(f"gradient norm is {norm}")
        if norm > self._settings.max_grad_norm:
            scale = self._settings.max_grad_norm / norm
            for _, main in named:
                if main.grad is not None:
                    main.grad.mul_(scale)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        for name, parameter in self._parameters.items():
            if parameter is not self._main[name]:
                parameter.data.copy_(self._main[name])
        self.clear()
        return norm

    def clear(self) -> None:
        """Drop all gradients and their memory."""
        self._adamw.zero_grad(set_to_none=True)

    def gradient_bytes(self) -> int:
        """What gradients of this rank still take."""
        held = {id(owner): owner for owner in (*self._parameters.values(), *self._main.values())}
        return sum(owner.grad.nbytes for owner in held.values() if owner.grad is not None)

    def state(self) -> State:
        """`<parameter>.exp_avg`, `.exp_avg_sq` and `.step` of each updated parameter, and `.main` of a rounded one."""
        state: State = {}
        for name, main in self._main.items():
            for kind in _KINDS if main in self._adamw.state else ():
                state[f"{name}.{kind}"] = self._adamw.state[main][kind]
            if main is not self._parameters[name]:
                state[f"{name}.main"] = main
        return state

    def load_state(self, state: State) -> None:
        """Take what `state` gave. Raises WeightError for a tensor that is missing or of another shape."""
        for name, main in self._main.items():
            if main is not self._parameters[name]:
                main.data.copy_(_tensor(state, f"{name}.main", main.shape))
            if f"{name}.step" not in state:
                continue
            self._adamw.state[main] = {
                "step": _tensor(state, f"{name}.step", torch.Size()).clone(),
                "exp_avg": _tensor(state, f"{name}.exp_avg", main.shape).clone(),
                "exp_avg_sq": _tensor(state, f"{name}.exp_avg_sq", main.shape).clone(),
            }


def _main_copy(parameter: Tensor) -> Tensor:
    if parameter.dtype == torch.float32:
        return parameter
    main = parameter.detach().float().requires_grad_()
    for mark in _PARALLEL_MARKS:
        setattr(main, mark, getattr(parameter, mark, False))

    def add(p: Tensor) -> None:
        assert p.grad is not None
        main.grad = p.grad.float() if main.grad is None else main.grad.add_(p.grad)
        p.grad = None

    parameter.register_post_accumulate_grad_hook(add)
    return main


def _tensor(state: State, name: str, shape: torch.Size) -> Tensor:
    found = state.get(name)
    if found is None or found.shape != shape:
        what = "missing" if found is None else f"of shape {tuple(found.shape)}"
        raise WeightError(
            f"optimizer state {name} is {what}, expected shape {tuple(shape)}: "
            "the checkpoint is of another model or layout"
        )
    return found
