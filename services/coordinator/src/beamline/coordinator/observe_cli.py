"""Commands that look at a run: they change nothing in it. Imports as in `cli`."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

observe_app = typer.Typer()
"""Its commands are commands of `beamline` itself."""
WIDE = 240
"""Columns for a table that is not to be squeezed into a narrow terminal or a pipe."""

RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's name under --runs, or its folder.")]
Runs = Annotated[Path, typer.Option("--runs", help="The folder that holds the runs.")]


@observe_app.command()
def metrics(
    run: RunName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    glob: Annotated[str, typer.Option("--filter", metavar="GLOB", help="Names to show, such as 'timing/*'.")] = "",
    gauges: Annotated[bool, typer.Option("--gauges", help="Live numbers instead of those of steps.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print all records, one JSON object a line.")] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Show a run's numbers: the last value of each, or all as they come."""
    from beamline.coordinator.launch.find_run import find_run
    from beamline.coordinator.observe.metric_command import show_metrics

    with suppress(KeyboardInterrupt):
        asyncio.run(show_metrics(find_run(run, runs), glob, live=gauges, follow=follow, json=json))


@observe_app.command()
def trace(
    target: Annotated[str, typer.Argument(help="A run's name under --runs, its folder, or a group such as g-000012.")],
    run: Annotated[
        str, typer.Option("--run", help="Where a group is looked for. Default: the newest run with it.")
    ] = "",
    step: Annotated[int | None, typer.Option("--step", help="Of a run. Default: the last that has ended.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option("--perfetto", help="Write the whole run to a file that ui.perfetto.dev opens.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Show where a step's time went, or a prompt group's way from prompt to gradient."""
    from rich.console import Console

    from beamline.coordinator.observe import trace_command

    if perfetto is not None:
        typer.echo(trace_command.write_perfetto(target, runs, step, perfetto))
        return
    found = trace_command.trace(target, runs, run, step)
    if json:
        typer.echo(trace_command.as_json(found))
    else:
        trace_command.show(found, Console(width=WIDE, soft_wrap=True, markup=False, highlight=False))


@observe_app.command()
def logs(
    run: RunName,
    who: Annotated[str, typer.Argument(metavar="[WORKER]", help="A worker or a service; everyone if not given.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    step: Annotated[int | None, typer.Option(help="Only what was done for this step.")] = None,
    level: Annotated[str, typer.Option(help="The least level: DEBUG, INFO, WARNING, ERROR or CRITICAL.")] = "DEBUG",
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Print the logs of a run's workers, put together by time."""
    from beamline.coordinator.launch.find_run import find_run
    from beamline.coordinator.observe.log_print import choose_print
    from beamline.coordinator.observe.logs import Wanted, show_logs

    wanted = Wanted(who=who, step=step, level=level.upper())
    with suppress(KeyboardInterrupt):
        asyncio.run(show_logs(find_run(run, runs), wanted, choose_print(json=json), follow=follow))


@observe_app.command()
def top(run: RunName, runs: Runs = Path("runs")) -> None:
    """Watch a live run on the whole terminal; q leaves. Plain lines in a pipe."""
    from rich.console import Console

    from beamline.coordinator.launch.find_run import find_run
    from beamline.coordinator.observe.top import top as show_top

    with suppress(KeyboardInterrupt):
        asyncio.run(show_top(find_run(run, runs), Console(soft_wrap=True)))


@observe_app.command()
def dashboard(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="A run's name or folder; the newest if not given.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    opened: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Serve a page that shows a run, live or ended, and updates by itself. Ctrl-C ends it."""
    from beamline.coordinator.dashboard import serve

    with suppress(KeyboardInterrupt):
        serve.dashboard(run, runs, port, opened=opened)
