"""The command line. Every command imports what it needs when it runs, so that `--help` is quick.

An error that the user can mend is one line and exit code 2; a run that failed ends with the exit code of the service
that ended it, as a rule 1; `--debug` adds the traceback to either.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from beamline.coordinator.checkpoint_cli import checkpoint_app
from beamline.coordinator.data_cli import data_app
from beamline.coordinator.env_file import load_env_file
from beamline.coordinator.observe_cli import RunName, Runs, observe_app
from beamline.protocol.errors import BeamlineError, ConfigError

if TYPE_CHECKING:
    from beamline.protocol.messages import Message

HELP = "Train mixture-of-experts language models with reinforcement learning. --debug shows an error's traceback."
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=HELP)
app.add_typer(observe_app)
app.add_typer(checkpoint_app)
app.add_typer(data_app, name="data")
doctor_app = typer.Typer(no_args_is_help=True, help="Find out what is wrong.")
app.add_typer(doctor_app, name="doctor")

WIDE = 240
"""Columns for a table that is not to be squeezed into a narrow terminal or a pipe."""
CONFIG_EXIT = 2
INTERRUPTED_EXIT = 130
"""128 + SIGINT, as shells have it."""


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A name in recipes/, or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[A.B=C]...", help="Settings to change.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run of that name.")] = False,
) -> None:
    """Start a run and see it to its end. Ctrl-C ends it after its step, twice at once."""
    from rich.console import Console

    from beamline.coordinator.launch.display import choose_display
    from beamline.coordinator.launch.run import run as run_recipe
    from beamline.coordinator.launch.status import artifact_lines, show_summary
    from beamline.coordinator.summary import read_summary
    from beamline.runtime.recipe import load_recipe

    config = load_recipe(recipe, overrides or [])
    run_dir = asyncio.run(run_recipe(config, choose_display(), overwrite=overwrite))
    summary = read_summary(run_dir / "summary.json")
    show_summary(summary, Console(soft_wrap=True))
    for line in artifact_lines(run_dir, summary):
        typer.echo(line)


@app.command("eval")
def evaluate(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A name in recipes/, or a YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[A.B=C]...", help="Settings to change.")] = None,
    checkpoint: Annotated[
        str,
        typer.Option(help="A checkpoint's or run's folder, a Hugging Face directory, or latest. Default: model.path."),
    ] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run of that name.")] = False,
) -> None:
    """Evaluate a checkpoint on the recipe's eval sets, without training."""
    from rich.console import Console

    from beamline.coordinator import eval_command
    from beamline.coordinator.eval_table import show_evaluations
    from beamline.coordinator.launch.display import choose_display
    from beamline.coordinator.launch.status import artifact_lines

    run_dir, summary = eval_command.evaluate(
        recipe, overrides or [], checkpoint, choose_display(), os.environ, overwrite=overwrite
    )
    show_evaluations(summary.evaluations, Console(width=WIDE, soft_wrap=True))
    for line in artifact_lines(run_dir, summary):
        typer.echo(line)
    eval_command.check_graded(summary)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help="A run's name under --runs, or its folder.")],
    second: Annotated[str, typer.Argument(metavar="RUN", help="Another one.")],
    metric: Annotated[list[str] | None, typer.Option(help="A metric to compare as well; may be repeated.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Put two runs side by side, with the significance of what differs."""
    from rich.console import Console

    from beamline.coordinator.compare_command import as_json, compare_runs
    from beamline.coordinator.compare_text import show_comparison

    comparison = compare_runs(first, second, runs, metric or [])
    if json:
        typer.echo(as_json(comparison))
    else:
        show_comparison(comparison, Console(width=WIDE, soft_wrap=True, markup=False, highlight=False))


@app.command()
def status(run: RunName, runs: Runs = Path("runs")) -> None:
    """Show how a run stands."""
    from rich.console import Console

    from beamline.coordinator.launch.ask import ask
    from beamline.coordinator.launch.find_run import find_run
    from beamline.coordinator.launch.run_folder import in_use
    from beamline.coordinator.launch.status import show_status, show_summary
    from beamline.coordinator.summary import read_summary
    from beamline.protocol.messages import StatusRequest

    run_dir, console = find_run(run, runs), Console(soft_wrap=True)
    if in_use(run_dir):
        show_status(asyncio.run(ask(run_dir, StatusRequest())), console)
    elif (run_dir / "summary.json").is_file():
        show_summary(read_summary(run_dir / "summary.json"), console)
    else:
        raise ConfigError(f"run {run_dir.name} was ended before its end: its logs are in {run_dir / 'logs'}")


@app.command()
def stop(run: RunName, runs: Runs = Path("runs")) -> None:
    """End a run after the step under way."""
    from beamline.protocol.messages import StopRequest

    _tell(run, runs, StopRequest(), "ends after the step under way")


@app.command()
def pause(run: RunName, runs: Runs = Path("runs")) -> None:
    """Admit no further prompt groups until resumed."""
    from beamline.protocol.messages import PauseRequest

    _tell(run, runs, PauseRequest(), "admits no further groups until `beamline resume`")


@app.command()
def resume(run: RunName, runs: Runs = Path("runs")) -> None:
    """Go on after a pause."""
    from beamline.protocol.messages import ResumeRequest

    _tell(run, runs, ResumeRequest(), "goes on")


@doctor_app.command()
def mismatch(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="A finished run's name under --runs, or its folder.")
    ] = "",
    model: Annotated[Path | None, typer.Option("--model", help="A Hugging Face directory instead of a run.")] = None,
    runs: Runs = Path("runs"),
    directory: Annotated[Path, typer.Option("--to", help="Where the findings about --model go.")] = Path("doctor"),
    data: Annotated[Path | None, typer.Option("--data", help="Prompts to sample from, in parquet.")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Prompts to sample from.")] = 8,
    samples: Annotated[int, typer.Option(min=1, help="Samples a prompt.")] = 8,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Response tokens of a sample.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the sampling.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Sample anew where the run has kept samples.")] = False,
) -> None:
    """Explain why the engine's log-probabilities differ from the trainer's, from a run's samples or from new ones."""
    from rich.console import Console

    from beamline.coordinator.doctor.case import Options, case_of_model, case_of_run
    from beamline.coordinator.doctor.mismatch import examine
    from beamline.coordinator.doctor.show import show
    from beamline.coordinator.doctor.sides import Sides
    from beamline.coordinator.launch.find_run import find_run
    from beamline.coordinator.progress_bar import working

    if bool(run) == (model is not None):
        raise ConfigError("nothing to examine: give either a finished run's name, or --model DIR")
    options = Options(problems, samples, max_tokens, temperature, precision, data, fresh)
    case = case_of_model(model, directory, options) if model else case_of_run(find_run(run, runs), options)
    sides = Sides(os.environ, threads=len(os.sched_getaffinity(0)))
    with working() as work:
        diagnosis, page = examine(case, options, sides, work.part)
    show(diagnosis, Console(soft_wrap=True))
    typer.echo(f"  figures    {page.with_suffix('.json')}")
    typer.echo(f"  page       {page}")


@doctor_app.command()
def stuck(
    run: RunName,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    runs: Runs = Path("runs"),
) -> None:
    """Explain why a live run stands still: what waits for what, root cause first. Exit code 1 if it is stuck."""
    import msgspec

    from beamline.coordinator.doctor.stuck import diagnose
    from beamline.coordinator.doctor.stuck_gather import gather
    from beamline.coordinator.doctor.stuck_show import lines
    from beamline.coordinator.launch.find_run import find_run

    diagnosis = diagnose(asyncio.run(gather(find_run(run, runs))))
    for line in [msgspec.json.encode(diagnosis).decode()] if json else lines(diagnosis):
        typer.echo(line)
    if diagnosis.is_stuck:
        raise typer.Exit(1)


def _tell(run: str, runs: Path, request: "Message", effect: str) -> None:
    from beamline.coordinator.launch.ask import ask
    from beamline.coordinator.launch.find_run import find_run

    run_dir = find_run(run, runs)
    status = asyncio.run(ask(run_dir, request))
    typer.echo(f"run {run_dir.name} (step {status.step}/{status.num_steps}) {effect}")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point: typer's, with errors as one plain line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    given = [argument for argument in arguments if argument != "--debug"]
    try:
        load_env_file(os.environ)
        app(given, prog_name="beamline")
        sys.exit(0)
    except (BeamlineError, OSError) as error:
        if debug:
            raise
        typer.echo(f"beamline: {error}", err=True)
        sys.exit(exit_code(error))


def exit_code(error: Exception) -> int:
    """How `beamline` ends by an error."""
    from beamline.coordinator.launch.interrupt import Interrupted
    from beamline.coordinator.launch.supervisor import RunFailed

    if isinstance(error, Interrupted):
        return INTERRUPTED_EXIT
    if isinstance(error, RunFailed):
        return error.exit_code
    return CONFIG_EXIT if isinstance(error, ConfigError | OSError) else 1


if __name__ == "__main__":
    main()
