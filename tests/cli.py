"""Commands as a user runs them: from a folder with a penstock.yaml, to their end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .pipeline import penstock

SECRET = "hunter6"
"""Stands in URLs, and must never be shown."""


def write(folder: Path, *lines: str) -> Path:
    path = folder / "penstock.yaml"
    path.write_text("\n".join(lines))
    return path


def run(folder: Path, command: str, *arguments: str, **environment: str) -> str:
    """Run a command that must succeed, and return what it prints."""
    done = penstock(*command.split(), *arguments, cwd=folder, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fails(folder: Path, code: int, command: str, *arguments: str, **environment: str) -> str:
    """Run a command that must end with `code`, and return the error that it prints."""
    done = penstock(*command.split(), *arguments, cwd=folder, environment=environment)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert "Traceback" not in output
    assert SECRET not in output
    assert done.stdout == ""
    return done.stderr


def listed(folder: Path, command: str, **environment: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(folder, command, "--json", **environment))
    return found
