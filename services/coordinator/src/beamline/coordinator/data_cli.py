"""`beamline data`: prompts in parquet, prepared from what is published, and checked before a run meets them."""

import os
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from beamline.protocol.config import DataSection
from beamline.protocol.errors import ConfigError

if TYPE_CHECKING:
    from beamline.models.dataset_preparation import Prepared

data_app = typer.Typer(no_args_is_help=True, help="Prompts in parquet.")

SHOWN_OF_A_KIND = 20
DEFAULTS = DataSection()


class DataSet(StrEnum):
    DAPO = "dapo"
    AIME_2024 = "aime-2024"
    AIME_2025 = "aime-2025"
    GSM8K = "gsm8k"
    MATH_500 = "math-500"


@data_app.command()
def prepare(
    name: Annotated[DataSet, typer.Argument(help="The data set.")],
    source: Annotated[
        str, typer.Option("--from", help="The published file, .jsonl or .parquet, or a data set's name on the hub.")
    ] = "",
    directory: Annotated[
        Path, typer.Option("--to", envvar="DATA_DIR", help="Where the parquet file is written.")
    ] = Path(DEFAULTS.dir),
    split: Annotated[str | None, typer.Option(help="Of sets that have several, such as train or test.")] = None,
) -> None:
    """Turn a published data set into prompts that a run can read, one row a problem. Without --from it comes from the
    hub."""
    from beamline.coordinator.progress_bar import tracked, working
    from beamline.models.dataset_preparation import prepare as prepare_file
    from beamline.models.dataset_sources import choose_split, find_source

    try:
        chosen = choose_split(name, split, Path(source).stem)
        file = _local_file(source or find_source(name).hub, chosen)
        with working() as work:
            prepared = prepare_file(name, file, directory, chosen, track=partial(tracked, work))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    typer.echo(str(prepared.path))
    for line in _told(prepared):
        typer.echo(f"  {line}", err=True)


@data_app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Prompts in .parquet or .jsonl.")],
    model: Annotated[
        str, typer.Option("--model", help="A Hugging Face directory or asset:NAME, whose tokens are counted.")
    ] = "",
    max_prompt_tokens: Annotated[
        int, typer.Option("--max-prompt-tokens", min=1, help="Of a run; with --model.")
    ] = DEFAULTS.max_prompt_tokens,
    grader: Annotated[
        str, typer.Option("--grader", help="Which has to read the ground truths, or none.")
    ] = "math_dapo",
    everything: Annotated[
        bool, typer.Option("--all", help=f"Show more than the first {SHOWN_OF_A_KIND} of a kind.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say what is wrong with a data set, row by row. Exit code 1 when something is."""
    from beamline.coordinator.data_check import Examination
    from beamline.coordinator.progress_bar import working

    examination = Examination(
        file=file, model=model, max_prompt_tokens=max_prompt_tokens, grader="" if grader == "none" else grader
    )
    with working() as work:
        findings = examination.run(os.environ, None if everything else SHOWN_OF_A_KIND, work)
    for line in [examination.json(findings)] if as_json else examination.lines(findings):
        typer.echo(line)
    if findings.counts:
        raise typer.Exit(1)


def _local_file(source: str, split: str) -> Path:
    """The file itself, or the one that the hub has under this name."""
    from beamline.coordinator.hub import Hub, is_hub_name

    return Hub().fetch(source, split) if is_hub_name(source) and not Path(source).exists() else Path(source)


def _told(prepared: "Prepared") -> list[str]:
    cleaned = prepared.cleaned
    told = [f"{cleaned.num_read:,} rows read, {len(cleaned.kept):,} written"]
    if cleaned.num_duplicates:
        told.append(f"{cleaned.num_duplicates:,} left out: equal to an earlier row")
    if cleaned.num_ambiguous:
        prompts = f"their prompts ({cleaned.num_ambiguous_prompts:,}) have more than one answer"
        told.append(f"{cleaned.num_ambiguous:,} left out: {prompts}")
    return told
