"""The doctor's comparison of a model's directory with the pieces that an engine verified."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from beamline.models import tiny
from beamline.trainer.doctor.stored_weights import differing_weights
from beamline.weights.manifest import WeightManifest
from beamline.weights.shm import ShmOwner
from beamline.weights.tensors import Shard

WEIGHTS = "model.safetensors"
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny.build(tiny.TINY_BEAM, tmp_path / "model", seed=0, randomise=True)
    return tmp_path / "model"


@pytest.fixture
def manifest(model: Path, tmp_path: Path) -> WeightManifest:
    """Of the model, every matrix in four pieces."""
    wholes = [Shard.whole(name, str(values.dtype), values) for name, values in load_file(model / WEIGHTS).items()]
    owner = ShmOwner(tmp_path / "rank-0.sock")
    halves = [half for whole in wholes for half in whole.cut(0, 2)]
    owner.export(0, (part for half in halves for part in half.cut(half.values.ndim - 1, 2)))
    described = owner.describe()
    owner.close()
    return described


def test_the_verified_model_does_not_differ(model: Path, manifest: WeightManifest):
    assert max(len(entry.pieces) for entry in manifest.tensors) == 4
    assert differing_weights(model, manifest) == []


def test_every_kind_of_difference_is_found(model: Path, manifest: WeightManifest):
    tensors = load_file(model / WEIGHTS)
    tensors[HEAD][-1, -1] += 1
    tensors[NORM] = tensors[NORM].astype(np.float16)
    del tensors[EMBEDDING]
    tensors["more"] = np.zeros(2, np.float32)
    save_file(tensors, model / WEIGHTS)
    assert sorted(differing_weights(model, manifest)) == [HEAD, EMBEDDING, NORM, "more"]
