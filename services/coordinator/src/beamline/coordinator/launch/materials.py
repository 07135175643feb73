"""What a recipe names as `asset:` or `task:`, made in the run's folder; what an earlier start has made is checked."""

import filecmp
import shutil
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from beamline.coordinator.launch import preflight
from beamline.models import assets, chained_sums
from beamline.models.datasets import PromptRow, write_rows
from beamline.protocol.config import DataSection, EvalSet
from beamline.protocol.errors import ConfigError


class Materials:
    """Makes the model and the data of one run.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def place_model(self, path: str) -> str:
        """The model's directory, absolute."""
        if not path.startswith(preflight.ASSET):
            return str(Path(path).resolve())
        name = path.removeprefix(preflight.ASSET)
        return str(self._make(self._folder / "model", lambda draft: assets.materialise(name, draft)))

    def place_data(self, data: DataSection) -> DataSection:
        """With the paths of prompt files, absolute."""
        return replace(
            data,
            train=self._place_train(data.train),
            evals=[replace(evaluation, path=self._place_eval(evaluation)) for evaluation in data.evals],
        )

    def _place_train(self, path: str) -> str:
        if path != preflight.CHAINED_SUMS:
            return str(Path(path).resolve())
        return self._write_problems("train", chained_sums.train_problems())

    def _place_eval(self, evaluation: EvalSet) -> str:
        if evaluation.path != preflight.CHAINED_SUMS:
            return str(Path(evaluation.path).resolve())
        number = evaluation.max_problems or chained_sums.MAX_EVAL_PROBLEMS
        return self._write_problems(f"eval-{number}", chained_sums.eval_problems(number))

    def _write_problems(self, split: str, problems: list[chained_sums.Problem]) -> str:
        rows = (
            PromptRow(
                data_source=chained_sums.DATA_SOURCE,
                messages=({"role": "user", "content": problem.prompt},),
                ground_truth=str(problem.answer),
                index=index,
                split=split,
            )
            for index, problem in enumerate(problems)
        )
        target = self._folder / "data" / f"{chained_sums.DATA_SOURCE}-{split}.parquet"
        return str(self._make(target, lambda draft: write_rows(draft, rows)))

    def _make(self, target: Path, make: Callable[[Path], object]) -> Path:
        """Make a file or a folder of files. Raises ConfigError where something else is there under its name."""
        draft = target.with_name(f".{target.name}.draft")
        _remove(draft)
        draft.parent.mkdir(parents=True, exist_ok=True)
        make(draft)
        if not target.exists():
            draft.rename(target)
            return target
        changed = _first_change(draft, target)
        _remove(draft)
        if changed:
            raise ConfigError(
                f"{changed} is not what the run began with: the checkpoints belong to that. Remove {target} to have it "
                "made again"
            )
        return target


def _first_change(made: Path, there: Path) -> Path | None:
    """The first file of what is there that differs from what was made."""
    files = [path.relative_to(made) for path in made.rglob("*") if path.is_file()] if made.is_dir() else [Path()]
    for file in sorted(files):
        if not (there / file).is_file() or not filecmp.cmp(made / file, there / file, shallow=False):
            return there / file
    return None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
