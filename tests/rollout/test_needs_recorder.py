"""What loading code reads of a tensor is recorded as boxes, however it cuts its way there."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from beamline.rollout.needs_recorder import NeedsRecorder, box_of

SHAPE = (6, 8, 10)
WHOLE = ((0, 6), (0, 8), (0, 10))
TARGET = torch.zeros(480)


def recorded(read: Callable[[torch.Tensor], object]) -> list:
    recorder = NeedsRecorder()
    ((_, tensor),) = recorder.follow([("t", torch.arange(480.0).view(SHAPE))])
    read(tensor)
    return recorder.needs["t"].boxes if recorder.needs else []


@pytest.mark.parametrize(
    ("read", "boxes"),
    [
        (lambda t: torch.zeros(3, 8, 10).copy_(t.narrow(0, 2, 3)), [((2, 5), (0, 8), (0, 10))]),
        (lambda t: torch.zeros(6, 4, 10).copy_(t[:, 4:]), [((0, 6), (4, 8), (0, 10))]),
        (lambda t: torch.zeros(5, 8).copy_(t[3].t().chunk(2)[1]), [((3, 4), (0, 8), (5, 10))]),
        (lambda t: torch.zeros(10).copy_(t[1, 2]), [((1, 2), (2, 3), (0, 10))]),
        (lambda t: torch.zeros(3, 8, 10).copy_(t[::2]), [((0, 5), (0, 8), (0, 10))]),
        (lambda t: t[0, 0, 0].item(), [((0, 1), (0, 1), (0, 1))]),
        (lambda t: t[5].to(torch.bfloat16), [((5, 6), (0, 8), (0, 10))]),
        (lambda t: [torch.zeros(8, 10).copy_(one) for one in t.unbind(0)[:2]],
         [((0, 1), (0, 8), (0, 10)), ((1, 2), (0, 8), (0, 10))]),
        (lambda t: torch.cat([t[0], t[2]]), [((0, 1), (0, 8), (0, 10)), ((2, 3), (0, 8), (0, 10))]),
        (lambda t: TARGET.copy_(t.contiguous().view(-1)), [WHOLE]),
        (lambda t: torch.nn.Parameter(torch.zeros(8, 10)).data.copy_(t.data[4].detach()), [((4, 5), (0, 8), (0, 10))]),
        (lambda t: TARGET.view(SHAPE).__setitem__(slice(None), t), [WHOLE]),
    ],
)  # fmt: skip
def test_what_is_read_is_noted(read: Callable[[torch.Tensor], object], boxes: list) -> None:
    assert recorded(read) == boxes


def test_looking_at_shape_and_kind_reads_nothing() -> None:
    def look(tensor: torch.Tensor) -> None:
        assert tensor.shape == SHAPE and tensor.size(1) == 8 and tensor.dim() == 3 and tensor.numel() == 480
        assert tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.is_floating_point()
        assert tensor.narrow(0, 0, 2).contiguous().stride() == (80, 10, 1) and len(tensor) == 6

    assert recorded(look) == []


def test_the_dtype_in_which_it_is_held_is_noted() -> None:
    recorder = NeedsRecorder()
    ((_, tensor),) = recorder.follow([("t", torch.zeros(4))])
    torch.zeros(4, dtype=torch.bfloat16).copy_(tensor)
    assert recorder.needs["t"].dtype == "bfloat16"


def test_the_box_of_a_random_view_holds_every_element_of_it() -> None:
    """Cut, turn, thin out and flatten at random; the elements that are left must lie in the box."""
    rng = np.random.default_rng(5)
    num_smaller = 0
    for _ in range(500):
        base = torch.arange(480.0)[: 6 * 8 * 5].view(6, 8, 5)
        view = base
        for _ in range(rng.integers(1, 5)):
            dim = int(rng.integers(view.dim()))
            start = int(rng.integers(view.shape[dim]))
            length = int(rng.integers(1, view.shape[dim] - start + 1))
            match rng.integers(4):
                case 0:
                    view = view.narrow(dim, start, length)
                case 1:
                    view = view.transpose(dim, 0)
                case 2:
                    view = view[:: int(rng.integers(1, 3))]
                case _ if view.is_contiguous():
                    view = view.reshape(-1, view.shape[-1])
        box = box_of(base, view)
        inside = base[tuple(slice(*edge) for edge in box)]
        assert np.isin(view.numpy().ravel(), inside.numpy().ravel()).all()
        num_smaller += inside.numel() < base.numel()
    assert num_smaller > 200
