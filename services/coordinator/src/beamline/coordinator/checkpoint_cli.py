"""Commands about checkpoints: which a run has, whether they are whole, and one as a model. Imports as in `cli`."""

from pathlib import Path
from typing import Annotated

import typer

from beamline.coordinator.observe_cli import WIDE, RunName, Runs
from beamline.protocol.errors import ConfigError, WeightError

checkpoint_app = typer.Typer()
"""Its commands are commands of `beamline` itself."""


@checkpoint_app.command()
def checkpoints(
    run: RunName,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    runs: Runs = Path("runs"),
) -> None:
    """List a run's checkpoints: complete or not, verified or not."""
    import time

    from rich.console import Console

    from beamline.coordinator.checkpoint_table import as_json, show_checkpoints
    from beamline.coordinator.checkpoint_verify import root_of_run
    from beamline.coordinator.launch.find_run import find_run
    from beamline.runtime.checkpoints import checkpoints_of

    root = root_of_run(find_run(run, runs))
    found = checkpoints_of(root)
    if json:
        typer.echo(as_json(root, found))
    else:
        show_checkpoints(root, found, time.time(), Console(width=WIDE, soft_wrap=True, markup=False, highlight=False))


@checkpoint_app.command()
def verify(
    target: Annotated[
        str, typer.Argument(metavar="CHECKPOINT|RUN", help="A checkpoint's folder, or a run for all that it has.")
    ],
    runs: Runs = Path("runs"),
) -> None:
    """Read checkpoints to their last byte and compare with their manifests. Exit code 1 if one is not whole."""
    from beamline.coordinator.checkpoint_verify import meant, verified
    from beamline.coordinator.progress_bar import working

    with working() as work:
        outcomes = [verified(folder, work) for folder in meant(target, runs)]
    for outcome in outcomes:
        typer.echo(outcome.line)
    if any(outcome.wrong for outcome in outcomes):
        raise typer.Exit(1)


@checkpoint_app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, such as runs/demo/checkpoints/latest.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the Hugging Face directory is written.")],
    merge: Annotated[bool, typer.Option("--merge", help="Of adapters: a model with them merged into it.")] = False,
    base: Annotated[
        Path | None, typer.Option("--base", metavar="DIR", help="Where the adapters' model lies now, if it was moved.")
    ] = None,
) -> None:
    """Turn a checkpoint into a Hugging Face directory: a model, or adapters in PEFT's format."""
    from beamline.coordinator.progress_bar import working
    from beamline.runtime import export as exporting

    if not checkpoint.is_dir():
        raise ConfigError(f"{checkpoint} is not a checkpoint's folder: the end of `beamline run` says where it lies")
    if base is not None and not merge:
        raise ConfigError("--base is for --merge: without it adapters are exported as they are")
    try:
        with working(f"exporting {checkpoint}") as work:
            if merge:
                exported = exporting.export_merged(checkpoint, directory, base, work.advance)
            else:
                exported = exporting.export(checkpoint, directory, work.advance)
        typer.echo(str(exported))
    except WeightError as error:
        raise ConfigError(str(error)) from error
