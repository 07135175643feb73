"""AdamW whose float32 main weights and moments live on a local disk and pass through memory in buckets.

    optimizer = DiskAdamW(model.named_parameters(), "/scratch/optimizer", lr=1e-4, max_grad_norm=1.0)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

Bit for bit torch.optim.AdamW(fused=True) on float32 copies of the parameters. A process that is killed at any moment
leaves the last complete generation.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from beamline.diskoptim.buffers import Buffer
from beamline.diskoptim.directory import Copied, Generations
from beamline.diskoptim.errors import DirectoryError, StateError, check_room, explained
from beamline.diskoptim.files import ChosenIo, Io, choose_io
from beamline.diskoptim.gradients import clip_factor, flat_gradients, total_norm
from beamline.diskoptim.groups import Group, Params, make_groups
from beamline.diskoptim.layout import SECTIONS, bytes_needed
from beamline.diskoptim.state_file import AdamState, StateFile, with_sums, write_state
from beamline.diskoptim.stream import NUM_BUFFERS, Stream
from beamline.diskoptim.update import DeviceUpdate, HostUpdate, Step, plan_updates

BUCKET_BYTES = 256 * 2**20
MIN_BUCKET_BYTES = 64 * 2**10


class DiskAdamW:
    """Used by one thread of one process, which owns the directory until `close`.

    An empty directory gets the parameters' present values as generation 0; else the last complete generation is
    opened, and the parameters stay as they are until `load_params`. A state keeps the buckets with which it was made.
    Raises ValueError for arguments that make no sense, StateError, DirectoryError and DiskFull.
    """

    def __init__(
        self,
        params: Params,
        directory: Path | str,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_grad_norm: float | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        io: Io = "auto",
    ) -> None:
        self.groups: list[Group] = make_groups(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.max_grad_norm = max_grad_norm
        self.directory = Path(directory).absolute()
        self._bucket_bytes = _file_bucket_bytes(bucket_bytes)
        self._params = {name: tensor for group in self.groups for name, tensor in group.parameters.items()}
        self._generations = Generations(self.directory)
        try:
            with explained(self.directory):
                self._io: ChosenIo = choose_io(self.directory, io)
            if self._generations.present is None:
                num_params = sum(tensor.numel() for tensor in self._params.values())
                check_room(self.directory, bytes_needed(num_params), f"two generations of {num_params} parameters")
                self.import_state(((name, AdamState.fresh(tensor)) for name, tensor in self._params.items()), 0)
                self._generations.make_room(self._present.header.num_bytes)
            else:
                self._prepare()
        except Exception:
            self.close()
            raise

    @property
    def num_steps(self) -> int:
        """Steps that went into the present generation."""
        return self._present.num_steps

    @property
    def generation(self) -> int:
        """Of the state on disk: +1 with every step and import."""
        return self._present.header.generation

    def step(
        self, lr: float | None = None, grad_scale: float = 1.0, grads: Mapping[str, torch.Tensor] | None = None
    ) -> float | None:
        """One update from `.grad`, or from `grads` by name; they stay as they are. Returns the norm if it is limited.

        `lr` is for all groups from now on. Gradients are multiplied by `grad_scale`, then by what brings their norm
        (grad_scale times the given gradients' norm) to max_grad_norm. Raises GradientError, DiskFull, DirectoryError
        and StateError before anything is updated; when the disk fails later, the parameters may be part old and part
        new: repeat the step, or `load_params`.
        """
        for group in self.groups:
            group.lr = group.lr if lr is None else lr
        gradients = flat_gradients(self._params, grads)
        present = self._present
        target = self._generations.make_room(present.header.num_bytes)
        with (
            explained(self.directory, present.header.num_bytes),
            Stream(present, target, self._buffers, self._io) as stream,
        ):
            norm = total_norm(gradients) * grad_scale
            factors = self._factors(grad_scale, norm)
            step = Step(gradients=gradients, factors=factors, number=present.num_steps + 1)
            sums = stream.run(partial(self._update, step=step))
        self._generations.flip(with_sums(present.header, sums))
        return None if self.max_grad_norm is None else norm.item()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        for parameter in self._params.values():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def load_params(self) -> None:
        """The parameters become the rounded main weights, one parameter at a time."""
        for name, parameter in self._params.items():
            parameter.copy_(self._present.read_section(name, 0))

    def read(self, name: str, rows: slice | None = None) -> AdamState:
        """A parameter's state, as StateFile.read."""
        return self._present.read(name, rows)

    def import_state(self, tensors: Iterable[tuple[str, AdamState]], num_steps: int) -> None:
        """A new generation with this state, in any order of parameters; the parameters stay as they are.

        Raises StateError for a parameter that is missing, unknown, given twice or of another shape: then the present
        generation stays.
        """
        generation = 0 if self._generations.present is None else self.generation + 1
        write_state(
            self.directory,
            self._generations.spare,
            self._checked(tensors),
            num_steps,
            generation=generation,
            bucket_bytes=self._bucket_bytes,
            io=self._io,
        )
        self._generations.adopt()
        self._prepare()

    def snapshot(self, folder: Path | str, stem: str) -> Copied:
        """The present generation as `<stem>.state` and `<stem>.json` in a folder, which no later step changes.

        A hard link where folder and directory are on one filesystem, else a reflink, else a copy. Raises DiskFull and
        DirectoryError (the name is taken).
        """
        return self._generations.snapshot(Path(folder), stem)

    def close(self) -> None:
        """Give the directory to others. The object cannot be used any more."""
        self._generations.close()

    @property
    def _present(self) -> StateFile:
        if self._generations.present is None:
            raise DirectoryError(f"{self.directory} has no complete state: make the optimizer anew")
        return self._generations.present

    def _factors(self, grad_scale: float, norm: torch.Tensor) -> tuple[float, ...]:
        clip = 1.0 if self.max_grad_norm is None else clip_factor(norm, self.max_grad_norm)
        return tuple(factor for factor in (grad_scale, clip) if factor != 1.0)

    def _prepare(self) -> None:
        """Buffers and plan for the present generation's layout."""
        header = self._present.header
        _compare({name: tuple(tensor.shape) for name, tensor in self._params.items()}, self._present)
        plan = plan_updates(self.groups, header.parameters)
        self._buffers = [Buffer(header.section_length) for _ in range(NUM_BUFFERS)]
        device = next(iter(self._params.values())).device
        self._update = (
            HostUpdate(plan, self._buffers) if device.type == "cpu" else DeviceUpdate(plan, self._buffers, device)
        )

    def _checked(self, tensors: Iterable[tuple[str, AdamState]]) -> Iterator[tuple[str, AdamState]]:
        missing = dict(self._params)
        for name, state in tensors:
            if name not in missing:
                raise StateError(f"{name!r} is no parameter of this optimizer, or was given twice")
            expected = missing.pop(name).shape
            for section, tensor in (("main", state.main), ("exp_avg", state.exp_avg), ("exp_avg_sq", state.exp_avg_sq)):
                if tensor.shape != expected:
                    raise StateError(f"{section} of {name!r} is {list(tensor.shape)}, the parameter {list(expected)}")
            yield name, state
        if missing:
            raise StateError(f"the state of {next(iter(missing))!r} is missing, and of {len(missing) - 1} more")


def _compare(shapes: Mapping[str, tuple[int, ...]], state: StateFile) -> None:
    """Raises StateError where a state is of other parameters."""
    mend = "give these parameters a directory of their own, or empty this one to start anew"
    for name, shape in shapes.items():
        if name not in state.header.parameters:
            raise StateError(f"{state.path} has no parameter {name!r}; {mend}")
        if state.shape(name) != shape:
            raise StateError(
                f"parameter {name!r} is {list(shape)}, and {list(state.shape(name))} in {state.path}; {mend}"
            )
    if other := [name for name in state.names() if name not in shapes]:
        raise StateError(f"{state.path} has {other[0]!r} and {len(other) - 1} more that are not given; {mend}")


def _file_bucket_bytes(bucket_bytes: int) -> int:
    """Of a bucket on disk, so much smaller that three of them and scaled gradients fit in three times bucket_bytes."""
    if bucket_bytes < MIN_BUCKET_BYTES:
        raise ValueError(f"bucket_bytes={bucket_bytes} is below {MIN_BUCKET_BYTES}: give at least that")
    sections = NUM_BUFFERS * len(SECTIONS)
    return bucket_bytes * sections // (sections + 1)
