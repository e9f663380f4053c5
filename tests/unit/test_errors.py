"""The drawing of the hierarchy at the top of `penstock.core.errors` is the one that there is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

from penstock.core import errors

# In a process of its own: some modules are programs, and change their process as they are imported.
FIND = """
import importlib, pkgutil, penstock
from penstock.core.errors import PenstockError

# They run in airbyte-cdk's environment, which is not this one.
PROGRAM = ("async_jobs", "channel", "logins", "transport", "worker")
ELSEWHERE = {"penstock.syncs.airbyte." + name for name in PROGRAM}
for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
    if module.name not in ELSEWHERE:
        importlib.import_module(module.name)

def below(parent):
    for child in parent.__subclasses__():
        if not child.__name__.startswith("_"):
            yield child.__name__, parent.__name__
        yield from below(child)

print(dict(below(PenstockError)))
"""


def test_the_drawing_has_each_error_below_its_base() -> None:
    done = subprocess.run([sys.executable, "-c", FIND], capture_output=True, text=True, check=True)
    assert drawn() == ast.literal_eval(done.stdout)


def drawn() -> dict[str, str]:
    """Return the errors of the drawing with the one that each is below."""
    found, path = dict[str, str](), list[str]()
    for indent, name in re.findall(r"^    ( *)([A-Z]\w+)  +\S", errors.__doc__ or "", re.MULTILINE):
        depth = len(indent) // 2
        path[depth:] = [name]
        if depth:
            found[name] = path[depth - 1]
    return found
