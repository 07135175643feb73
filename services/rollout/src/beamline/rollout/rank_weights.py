"""One rank's share of a new policy: fetched by a thread of its own while the rank samples on, loaded in one go."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from beamline.protocol.errors import BeamlineError
from beamline.rollout.weight_check import check_dtypes
from beamline.weights.manifest import WeightManifest
from beamline.weights.plan import Needs
from beamline.weights.staging import Stage, Staged
from beamline.weights.transport import Content, DeviceBytes

# Shared memory is mapped read-only, and vLLM only copies from it.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


class RankWeights:
    """Stages one policy at a time.

    Args:
        needs: what the rank keeps of every tensor.
        held: in which dtype; empty where that is not known.
        dtype: of the engine.
        rank: by which errors call it.
    """

    def __init__(self, needs: Needs, held: Mapping[str, str], dtype: str, rank: str) -> None:
        self._held = held
        self._dtype = dtype
        self._rank = rank
        self._stage = Stage(needs)
        self._fetcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._fetching: Future[Staged] | None = None

    def start(self, manifest: bytes, then: Callable[[Staged], None] = lambda _: None) -> None:
        """Begin to fetch a policy, in place of the one that is staged. What goes wrong is in the answer.

        Args:
            then: done with the policy by the same thread, as a part of fetching it.
        """
        self.drop()
        self._fetching = self._fetcher.submit(self._fetch, manifest, then)

    def answer(self) -> int | str | None:
        """The bytes that were fetched, or why there are none; None while it is not done."""
        assert self._fetching is not None, "nothing is being fetched"
        if not self._fetching.done():
            return None
        error = self._fetching.exception()
        if error is None:
            return self._fetching.result().num_bytes
        if not isinstance(error, BeamlineError):
            raise error
        return f"{self._rank}: {error}"

    def take(self) -> Staged:
        """The staged policy, which is the caller's to load and to fence."""
        assert self._fetching is not None and self._fetching.done(), "no policy is staged"
        staged, self._fetching = self._fetching.result(), None
        return staged

    def drop(self) -> None:
        """Let go of what is staged, and of what is being fetched as soon as that is there."""
        if self._fetching is not None:
            self._fetching.add_done_callback(_fence)
            self._fetching = None

    def _fetch(self, encoded: bytes, then: Callable[[Staged], None]) -> Staged:
        manifest = WeightManifest.decode(encoded)
        check_dtypes(manifest, self._held, self._dtype)
        staged = self._stage.fetch(manifest)
        then(staged)
        return staged


def tensors_of(staged: Staged, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """The needed tensors, or those of these names; what a rank does not keep of one is anything."""
    for entry, content in staged.tensors():
        if names is not None and entry.name not in names:
            continue
        yield entry.name, tensor_of(content, entry.dtype, entry.shape)


def tensor_of(content: Content, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """A view of bytes, where they lie."""
    kind = getattr(torch, dtype)
    if not all(shape):
        return torch.empty(tuple(shape), dtype=kind)
    if isinstance(content, DeviceBytes):
        return torch.as_tensor(content, device="cuda").view(kind).view(tuple(shape))
    return torch.frombuffer(content, dtype=kind).view(tuple(shape))


def _fence(fetching: "Future[Staged]") -> None:
    if not fetching.cancelled() and fetching.exception() is None:
        fetching.result().fence()
