"""Reading checkpoints: which there are, whether they are whole, which one is meant. Free of torch.

    <root>/global_step_N/
        policy/                       Hugging Face directory; of a run that trains adapters, adapter/ in PEFT's format
        optimizer/rank-*.{state,json} and rank-*.slots.json
        rng/rank-*.safetensors
        trainer_state.json            `TrainerState`
        data_cursor.json, ledger.json the coordinator's
        manifest.json                 size and checksum of all of them, written last
    <root>/latest                     link to the newest
    <root>/.global_step_N.draft       being written or removed, or left by a crash

A folder takes its name when it is complete. So whatever has its name is whole, unless it was damaged later, and that
the manifest finds. The trainer writes them (`trainer.checkpoint`).
"""

from pathlib import Path
from typing import Any

import msgspec

from beamline.protocol.errors import WeightError
from beamline.protocol.lora_config import LoraSection
from beamline.runtime.base_identity import BaseIdentity
from beamline.runtime.checkpoint_manifest import Advance, Manifest, Unusable, first_damage, read_manifest
from beamline.runtime.model_identity import ModelIdentity, first_difference
from beamline.runtime.verification import Verification

LATEST = "latest"
POLICY, ADAPTER, OPTIMIZER = "policy", "adapter", "optimizer"
TRAINER_STATE = "trainer_state.json"
STEP_PREFIX = "global_step_"
DRAFT_SUFFIX = ".draft"


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer has to know beside weights and optimizer, and what a list of checkpoints shows of them."""

    step: int
    dtype: str
    """Of the policy's weights."""
    model: ModelIdentity
    layout: dict[str, int]
    """tensor, expert, pipeline and data: the ranks that wrote it."""
    optimizer: dict[str, Any]
    """The settings of its run, `state` among them."""
    base: BaseIdentity | None = None
    """The model beneath the adapters, where it holds adapters."""
    lora: LoraSection | None = None
    """Which adapters these are."""
    versions: dict[str, str] = {}
    """Of the packages that wrote it."""
    created: float = 0.0
    """Unix time."""


class CheckpointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint as a list shows it; its files' content is not read."""

    step: int
    path: str
    num_bytes: int
    created: float
    """Unix time; of the folder's last change where no manifest tells."""
    holds: str
    """policy or adapter."""
    base: str
    """Path of the model that adapters are of; empty for a policy."""
    lora_rank: int
    """Of adapters; 0 for a policy."""
    layout: dict[str, int]
    optimizer_state: str
    """device, host or disk; empty where that is not known."""
    is_latest: bool
    wrong: str
    """Why it cannot be used, as far as that can be seen without reading all of it; empty for a complete one."""
    verified: float | None
    """Unix time of the last verification, unless the manifest has changed since."""
    found_damage: str
    """What that verification found; empty where all was well."""


def root_of(run_dir: Path, checkpoint_path: str) -> Path:
    """Where a run's checkpoints lie: `trainer.checkpoint_path`, or in its folder."""
    return Path(checkpoint_path).resolve() if checkpoint_path else run_dir / "checkpoints"


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"{STEP_PREFIX}{step}"


def draft_of(folder: Path) -> Path:
    """Where a folder lies while it is written or removed."""
    return folder.with_name(f".{folder.name}{DRAFT_SUFFIX}")


def holding(folder: Path) -> str:
    """What a checkpoint holds: policy or adapter."""
    return ADAPTER if (folder / ADAPTER).is_dir() else POLICY


def damage(folder: Path, deep: bool = True, *, model: Path | None = None, advance: Advance = lambda _: None) -> str:
    """What is wrong with a checkpoint, in words; empty where it is whole.

    The first word tells the kind: missing, incomplete, truncated, changed, damaged, foreign.

    Args:
        deep: read every byte and compare checksums; else names and sizes alone.
        model: Hugging Face directory of the model that it has to be of.
        advance: told of the bytes that were read.
    """
    try:
        manifest = read_manifest(folder)
        if _misnamed(folder, manifest):
            return f"foreign: its manifest is of step {manifest.step}"
        return first_damage(folder, manifest, deep=deep, advance=advance) or _of_another_model(folder, model)
    except Unusable as error:
        return str(error)
    except FileNotFoundError as error:
        return f"incomplete: {error.filename} went away while it was looked at"
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"damaged: it cannot be read ({error})"


def trainer_state(folder: Path) -> TrainerState | None:
    """None where a checkpoint has none that can be read."""
    try:
        return msgspec.json.decode((folder / TRAINER_STATE).read_bytes(), type=TrainerState)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def resolve(path: Path, *, model: Path | None = None, deep: bool = True, advance: Advance = lambda _: None) -> Path:
    """The folder of one checkpoint: `path` itself, or the newest where `path` is the folder of all.

    Raises WeightError for one that `damage` finds something in; it names the newest other one that is whole.
    """
    folder = path.resolve()
    if folder.is_dir() and not _is_one(folder):
        named = _newest_first(folder)
        if not named:
            raise WeightError(f"{folder} has no checkpoint: name the folder of one, or the folder that they lie in")
        folder = named[0]
    wrong = damage(folder, deep, model=model, advance=advance)
    if not wrong:
        return folder
    others = (other for other in _newest_first(folder.parent) if other != folder)
    whole = next((other for other in others if not damage(other, deep, model=model)), None)
    offer = f"use {whole}, the newest that is whole" if whole else "there is no other that is whole"
    raise WeightError(f"checkpoint {folder} cannot be used: {wrong}; {offer}")


def checkpoints_of(root: Path) -> list[CheckpointFacts]:
    """All checkpoints, newest first, and then what is being written or was left by a crash."""
    latest = (root / LATEST).resolve() if (root / LATEST).is_symlink() else None
    drafts = sorted(path for path in root.glob(f".{STEP_PREFIX}*{DRAFT_SUFFIX}") if _step(path) >= 0)
    facts = (_facts(folder, latest) for folder in [*_newest_first(root), *drafts])
    return [fact for fact in facts if fact is not None]


def _facts(folder: Path, latest: Path | None) -> CheckpointFacts | None:
    """None where it has been removed meanwhile."""
    try:
        changed = folder.stat().st_mtime
    except FileNotFoundError:
        return None
    manifest, state = _manifest(folder), trainer_state(folder)
    verification = Verification.of(folder)
    wrong = damage(folder, deep=False)
    if folder.name.startswith("."):
        wrong = "incomplete: it is being written or removed, or was left by a crash"
    return CheckpointFacts(
        step=_step(folder),
        path=str(folder),
        num_bytes=manifest.num_bytes if manifest else _num_bytes(folder),
        created=manifest.created if manifest else changed,
        holds=holding(folder),
        base=state.base.path if state and state.base else "",
        lora_rank=state.lora.rank if state and state.lora else 0,
        layout=state.layout if state else {},
        optimizer_state=str(state.optimizer.get("state", "")) if state else "",
        is_latest=folder.resolve() == latest,
        wrong=wrong,
        verified=verification.time if verification else None,
        found_damage=verification.damage if verification else "",
    )


def _is_one(folder: Path) -> bool:
    """Whether this is one checkpoint, whole or not, rather than the folder of all."""
    return folder.name.startswith(STEP_PREFIX) or any(
        (folder / name).exists() for name in ("manifest.json", TRAINER_STATE, POLICY, ADAPTER)
    )


def _newest_first(root: Path) -> list[Path]:
    """By the time at which they were made: a run that goes on from an earlier step makes later ones anew."""
    named = [path for path in root.glob(f"{STEP_PREFIX}*") if _step(path) >= 0 and path.is_dir()]
    return [path.resolve() for path in sorted(named, key=lambda p: (_created(p), _step(p)), reverse=True)]


def _created(folder: Path) -> float:
    manifest = _manifest(folder)
    try:
        return manifest.created if manifest else folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _step(folder: Path) -> int:
    """-1 for what is called otherwise."""
    digits = folder.name.removeprefix(".").removesuffix(DRAFT_SUFFIX).removeprefix(STEP_PREFIX)
    return int(digits) if digits.isdecimal() else -1


def _misnamed(folder: Path, manifest: Manifest) -> bool:
    return folder.name.startswith(STEP_PREFIX) and _step(folder) != manifest.step


def _of_another_model(folder: Path, model: Path | None) -> str:
    if model is None:
        return ""
    if (state := trainer_state(folder)) is None:
        return f"foreign: its {TRAINER_STATE} does not tell which model it is of"
    if state.model != ModelIdentity.of(model):
        described = Path(state.base.path) if state.base else folder / POLICY
        difference = first_difference(described, model) if (described / "config.json").is_file() else ""
        which = f", that at {state.base.path}" if state.base else ""
        return f"foreign: it is of another {state.model.architecture} than {model}{which}" + (
            f" ({difference})" * bool(difference)
        )
    if state.base and not (found := BaseIdentity.of(model)).is_of(state.base):
        return (
            f"foreign: its adapters were trained on {state.base.path} (index {state.base.index_xxh3_128[:8]}), and "
            f"{model} has other weights (index {found.index_xxh3_128[:8]})"
        )
    return ""


def _manifest(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except Unusable:
        return None


def _num_bytes(folder: Path) -> int:
    """Of what is there; files may come and go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total
