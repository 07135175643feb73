"""`python -m beamline.coordinator.report RUN_DIR`: make the report again from what the run left."""

import argparse
import sys
from pathlib import Path

from beamline.coordinator.report.page import write_report
from beamline.protocol.errors import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m beamline.coordinator.report", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="folder with summary.json and evals/")
    try:
        path = write_report(parser.parse_args().run_dir)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
