"""What the documents tell a reader to type exists, and so does every file they point at."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from beamline.coordinator.cli import app
from beamline.runtime.recipe import load_recipe
from sources import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NEEDED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads(recipe: Path) -> None:
    assert load_recipe(str(recipe), environment={}).model.path


@pytest.mark.parametrize("name", NEEDED)
def test_a_document_is_there(name: str) -> None:
    assert (ROOT / name).is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_says_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    missing = [f"make {t}" for t in re.findall(r"`make ([a-z]+)", text) if f"\n{t}:" not in makefile]
    commands = get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    missing += [f"beamline {c}" for c in re.findall(r"beamline ([a-z]+)", code(text)) if c not in commands]
    missing += [target for target in links(text) if not (document.parent / target).exists()]
    missing += [path for path in re.findall(r"`([\w./-]+/[\w.-]+\.\w+)`", text) if not known(path)]
    assert missing == []


def code(text: str) -> str:
    """What stands in code blocks and code spans."""
    return "\n".join([*re.findall(r"```.*?```", text, re.DOTALL), *re.findall(r"`[^`\n]+`", text)])


def links(text: str) -> list[str]:
    """Relative targets of Markdown links."""
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    return [target for target in targets if "://" not in target and not target.startswith("mailto:")]


def known(path: str) -> bool:
    """Whether a path of the checkout exists; what a run makes is not there yet."""
    return (ROOT / path).exists() or path.startswith(("runs/", "data/", ".tools/"))
