"""Makes the files of deploy/ that name metrics, from the metric schema.

services/coordinator/.venv/bin/python deploy/make [--check]
"""

import argparse
import sys
from pathlib import Path

import yaml
from rules import rule_file

from dashboards import dashboards

DEPLOY = Path(__file__).resolve().parents[1]
HEADER = "# Made by deploy/make from the metric schema: change it there.\n"


def files() -> dict[Path, str]:
    """What the files should hold."""
    rules = HEADER + yaml.safe_dump(rule_file(), sort_keys=False, width=120, allow_unicode=True)
    made = {DEPLOY / "grafana" / "dashboards" / name: text for name, text in dashboards().items()}
    return {**made, DEPLOY / "prometheus" / "alerts.yaml": rules}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is not up to date")
    is_check = parser.parse_args().check
    made = files()
    old = [path for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in old:
        if is_check:
            print(f"{path} is not up to date: run deploy/make", file=sys.stderr)
        else:
            path.write_text(made[path], encoding="utf-8")
            print(path)
    return int(is_check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
