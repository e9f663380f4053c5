"""The page about the architecture names what is there: folders, files, layers."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "penstock"
PAGE = (ROOT / "docs" / "discussion" / "architecture.md").read_text()
DRAWING, PROSE = PAGE.split("```")[1], PAGE.split("```")[2]
FOLDERS = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}


def layers() -> list[set[str]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (found,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [{name.strip() for name in layer.split("|")} for layer in found]


def test_the_layers_are_those_of_the_linter() -> None:
    table = PROSE.partition("| layer |")[2].partition("\n\n")[0]
    rows = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ")]
    page = [{name for name in re.findall(r"`(\w+)`", row) if name in FOLDERS} for row in rows]
    assert page == [layer for layer in layers() if layer != {"__main__"}]
    assert set().union(*page) == FOLDERS


@pytest.mark.parametrize(
    ("path", "name"), sorted(set(re.findall(r"`([\w./]+/[\w./]+)(?::(\w+))?`", PROSE)))
)
def test_a_path_is_there(path: str, name: str) -> None:
    if path.startswith("/"):
        return  # of the HTTP API
    places = [SOURCE / path, SOURCE / f"{path}.py", ROOT / path]
    found = next((place for place in places if place.exists()), None)
    assert found is not None, path
    assert not name or re.search(rf"^(class |def )?{name}\b", found.read_text(), re.M), (path, name)


def test_the_drawing_names_files() -> None:
    found = set(re.findall(r"(\w+)/", DRAWING))
    assert found - {"nats", "consumers", "backlog"} <= FOLDERS
    files = {path.stem for path in SOURCE.rglob("*.py")} | {path.name for path in SOURCE.rglob("*")}
    rows = re.findall(r"│ ([a-z]+(?: +>? ?[a-z]+)*(?: > [a-z]+)+) +│", DRAWING)
    named = {name for row in rows for name in re.findall(r"[a-z]+", row)}
    assert {"pgoutput", "writer", "capture"} <= named <= files
