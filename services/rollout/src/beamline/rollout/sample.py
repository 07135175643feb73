"""`python -m beamline.rollout.sample REQUEST FOLDER`: a few trajectories from a real engine, kept for the doctor.

The engine loads the model's tensors as it loads a policy in a run: through a manifest whose checksums it verifies.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamline.models.routing import RoutingShape
from beamline.protocol.adapter import adapter_shapes
from beamline.protocol.blobs import encode_blob
from beamline.protocol.config import EngineSection
from beamline.protocol.doctor import KeptGroup, KeptSamples, SampleRequest
from beamline.protocol.messages import PromptGroup
from beamline.rollout import checkpoint, environment
from beamline.rollout.engine import Completion, Engine
from beamline.rollout.pack import pack_routed_experts, pack_trajectories
from beamline.runtime.adapter_files import AdapterFiles
from beamline.runtime.adapter_merge import adapters_in
from beamline.runtime.heavy_import import import_heavy
from beamline.runtime.request_program import serve
from beamline.runtime.sample_files import write_index
from beamline.weights.manifest import WeightManifest, merge
from beamline.weights.shm import ShmOwner
from beamline.weights.tensors import STORAGE, Shard

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.bin"


async def sample(request: SampleRequest, folder: Path) -> None:
    """Sample every group and write blobs, manifest and index into `folder`.

    Raises:
        ConfigError: a model that cannot be served.
        Rejected: a prompt that does not fit it.
    """
    model_path = Path(request.model)
    engine = await _start(request, model_path)
    try:
        with exported(_policy(request), request.policy_version) as manifest:
            await engine.stage_weights(manifest)
            await engine.activate_weights()
        completions = await asyncio.gather(*(engine.generate(group) for group in request.groups))
    finally:
        await engine.close()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_bytes(manifest.encode())
    shape = checkpoint.routing_shape(model_path)
    kept = [_write(folder, *pair, shape) for pair in zip(request.groups, completions, strict=True)]
    sampling = request.groups[0].sampling
    write_index(
        folder,
        KeptSamples(
            policy_version=request.policy_version,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            manifest=MANIFEST,
            groups=kept,
        ),
    )


@contextmanager
def exported(policy: Iterator[Shard], policy_version: int) -> Iterator[WeightManifest]:
    """Tensors in shared memory, as a policy. Raises WeightError."""
    with tempfile.TemporaryDirectory(prefix="beamline-doctor-") as folder:
        owner = ShmOwner(Path(folder) / "weights.sock")
        try:
            owner.export(policy_version, policy)
            yield merge([owner.describe()])
        finally:
            owner.close()


def tensors_of(model_path: Path) -> Iterator[Shard]:
    """Every tensor of a directory as its file has it, one at a time."""
    from safetensors import safe_open

    for path in sorted(model_path.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no mapping
                yield _shard(name, file.get_tensor(name))


def _policy(request: SampleRequest) -> Iterator[Shard]:
    """What the engine is to serve: all weights, or adapters in its precision."""
    if not request.adapters:
        yield from tensors_of(Path(request.model))
        return
    import torch

    files = AdapterFiles(Path(request.adapters))
    for name in adapter_shapes(adapters_in(Path(request.model), request.lora)):
        yield _shard(name, torch.from_numpy(files.read(name)).to(getattr(torch, request.dtype)))


def _shard(name: str, values: "torch.Tensor") -> Shard:
    import torch

    tensor = values.contiguous()
    kind = str(tensor.dtype).removeprefix("torch.")
    bits = tensor.view(-1).view(torch.uint8).numpy().view(STORAGE[tensor.element_size()])
    return Shard.whole(name, kind, bits.reshape(tensor.shape))


async def _start(request: SampleRequest, model_path: Path) -> Engine:
    longest = max(len(group.prompt_tokens) + group.sampling.max_tokens for group in request.groups)
    checkpoint.check_servable(model_path, longest)
    environment.prepare(len(os.sched_getaffinity(0)))
    module: Any = import_heavy("beamline.rollout.vllm_engine")
    return await module.VllmEngine.start(
        model_path,
        dtype=request.dtype,
        max_model_tokens=longest,
        config=EngineSection(),
        policy_version=request.policy_version,
        lora=request.lora if request.adapters else None,
    )


def _write(folder: Path, group: PromptGroup, completions: list[Completion], shape: RoutingShape | None) -> KeptGroup:
    trajectories = pack_trajectories(group, completions)
    routed = pack_routed_experts(group, completions, shape) if shape else None
    kept = KeptGroup(
        trajectories=f"{group.group_id}.trajectories",
        routed_experts=f"{group.group_id}.routed_experts" if routed else "",
    )
    (folder / kept.trajectories).write_bytes(encode_blob(trajectories))
    if routed is not None:
        (folder / kept.routed_experts).write_bytes(encode_blob(routed))
    return kept


def keep_samples(request: SampleRequest, folder: Path) -> None:
    """Have an engine sample the request's groups; blobs, manifest and index are written into the folder."""
    asyncio.run(sample(request, folder))


if __name__ == "__main__":
    sys.exit(serve(SampleRequest, keep_samples))
