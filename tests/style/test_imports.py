"""Heavy packages are imported when they are needed: asking for help, or refusing a setting, is quick."""

import subprocess

import pytest

from sources import ROOT

HEAVY = (
    "torch",
    "vllm",
    "megatron",
    "transformers",
    "nats",
    "hydra",
    "omegaconf",
    "pyarrow",
    "numpy",
    "rich",
    "jinja2",
)
DEADLINE_S = 60
PRINT_HEAVY = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*[name for name in sys.argv[2:] if name in sys.modules])
"""


def heavy_imports(service: str, module: str) -> list[str]:
    interpreter = ROOT / "services" / service / ".venv" / "bin" / "python"
    assert interpreter.exists(), f"{interpreter} is missing: run `make setup`"
    command = [interpreter, "-c", PRINT_HEAVY, module, *HEAVY]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize("service", ["coordinator", "rollout", "reward", "trainer"])
def test_a_service_is_entered_without_heavy_imports(service: str) -> None:
    assert heavy_imports(service, f"beamline.{service}.__main__") == []


def test_the_command_line_is_entered_without_heavy_imports() -> None:
    assert [name for name in heavy_imports("coordinator", "beamline.coordinator.cli") if name != "rich"] == []


def test_every_part_is_checked_by_the_import_rules() -> None:
    rules = (ROOT / "tools" / "importlinter.toml").read_text()
    parts = [path.name for path in ROOT.glob("*/*/src/beamline/*") if path.is_dir() and path.name != "__pycache__"]
    assert len(parts) >= 9
    assert [part for part in parts if f'    "beamline.{part}",\n' not in rules] == []


def test_every_project_has_a_lock() -> None:
    projects = [path.parent for path in ROOT.glob("services/*/pyproject.toml")]
    assert len(projects) == 4
    assert [str(p.name) for p in [*projects, ROOT, ROOT / "tests/reference"] if not (p / "uv.lock").is_file()] == []
