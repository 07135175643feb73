"""Commands that look at a run: they change nothing in it. Imports as in `cli`."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

observe_app = typer.Typer()
"""Its commands are commands of `beamline` itself."""

RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's name under --runs, or its folder.")]
Runs = Annotated[Path, typer.Option("--runs", help="The folder that holds the runs.")]


@observe_app.command()
def metrics(
    run: RunName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Print the run's metrics, one JSON object a line."""
    from beamline.coordinator.launch.find_run import find_run
    from beamline.coordinator.launch.follow_metrics import follow_metrics, metrics_file

    run_dir = find_run(run, runs)
    if follow:
        asyncio.run(follow_metrics(run_dir, sys.stdout.buffer))
    else:
        sys.stdout.buffer.write(metrics_file(run_dir).read_bytes())
