"""A launcher to be signalled: `python launch_trial.py FOLDER WORKER=BEHAVIOUR...` runs a trial in FOLDER."""

import asyncio
import sys
from pathlib import Path

from beamline.coordinator.cli import exit_code
from beamline.coordinator.launch.display import PlainDisplay
from beamline.coordinator.launch.run import run
from beamline.protocol.errors import BeamlineError
from launcher_fakes import fake_command, trial_config


def main() -> None:
    folder, *behaviours = sys.argv[1:]
    command = fake_command(**dict(behaviour.split("=") for behaviour in behaviours))
    try:
        print(asyncio.run(run(trial_config(Path(folder)), PlainDisplay(), command=command)))
    except BeamlineError as error:
        print(f"beamline: {error}")
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
