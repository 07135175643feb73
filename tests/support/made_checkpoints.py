"""Checkpoints of a few bytes, made without a trainer: one file of each kind."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import xxhash

from beamline.runtime.checkpoint_manifest import MANIFEST, manifest_of
from beamline.runtime.checkpoints import LATEST, POLICY, TRAINER_STATE, TrainerState, step_folder
from beamline.runtime.model_identity import ModelIdentity

BUCKET_BYTES = 4096
STATE = "optimizer/rank-00000.state"
CONFIG = {"architectures": ["BeamForCausalLM"], "hidden_size": 64}


def make_checkpoint(
    root: Path, step: int, *, created: float | None = None, files: Mapping[str, bytes] | None = None
) -> Path:
    """`<root>/global_step_N`, to which `latest` points from then on; `files` are put into it beside what it has."""
    folder = step_folder(root, step)
    content = {**_content(step), **(files or {})}
    for name, written in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(written)
    state = TrainerState(
        step=step,
        dtype="float32",
        model=ModelIdentity.of(folder / POLICY),
        layout={"tensor": 2, "expert": 2, "pipeline": 1, "data": 1},
        optimizer={"state": "disk"},
    )
    (folder / TRAINER_STATE).write_bytes(msgspec.json.encode(state))
    (folder / MANIFEST).write_bytes(manifest_of(folder, step, created))
    (root / LATEST).unlink(missing_ok=True)
    (root / LATEST).symlink_to(folder.name)
    return folder


def _content(step: int) -> dict[str, bytes]:
    buckets = [bytes([step, number]) * (BUCKET_BYTES // 2) for number in range(3)]
    listed = [
        {"offset": number * BUCKET_BYTES, "num_bytes": BUCKET_BYTES, "xxh3_64": xxhash.xxh3_64_hexdigest(bucket)}
        for number, bucket in enumerate(buckets)
    ]
    return {
        "policy/config.json": json.dumps(CONFIG).encode(),
        "policy/model.safetensors": f"weights of step {step}".encode(),
        "policy/tokenizer.json": b"{}",
        STATE: b"".join(buckets),
        "optimizer/rank-00000.json": json.dumps({"buckets": listed}).encode(),
        "optimizer/rank-00000.slots.json": b"{}",
        "rng/rank-00000.safetensors": b"random",
        "data_cursor.json": json.dumps({"position": step}).encode(),
        "ledger.json": b"{}",
    }
