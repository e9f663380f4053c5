"""Where airbyte-cdk is: in an environment of its own, made from a lock in this package.

Beside Penstock's own packages it would cost every Python process of Spark's seconds, as these import
pandas where it is installed; and it asks for older ones than the lock of Penstock has.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import resources
from pathlib import Path
from typing import Final

from penstock.core.caches import folder
from penstock.syncs.errors import SyncError

VARIABLE: Final = "PENSTOCK_AIRBYTE_PYTHON"
COMMAND: Final = "penstock sync airbyte install"
_READY: Final = "ready"


def interpreter() -> Path:
    """Return the Python that has airbyte-cdk; raises `SyncError` where there is none."""
    if named := os.environ.get(VARIABLE):
        path = Path(named).expanduser()
        if not os.access(path, os.X_OK) or path.is_dir():
            raise SyncError(
                "connector",
                f"{VARIABLE} is {named}, which is no program on {_host()}.",
                remedy="Let it name a Python that has airbyte-cdk, or unset it.",
            )
        return path
    home = place()
    if not (home / _READY).exists():
        raise SyncError(
            "connector",
            f"airbyte-cdk is not installed on {_host()}: there is no environment {home}.",
            remedy=f"Run `{COMMAND}` on this host as this user, or let {VARIABLE} name a Python that"
            " has airbyte-cdk.",
        )
    return _python(home)


@functools.cache
def _lock() -> str:
    return resources.files(__package__).joinpath("requirements.lock").read_text("utf-8")


def place() -> Path:
    """Return where the environment of this Penstock and this Python is made."""
    version = hashlib.sha256(_lock().encode()).hexdigest()[:12]
    return folder() / f"airbyte-{sys.version_info[0]}.{sys.version_info[1]}-{version}"


def install() -> Path:
    """Make the environment, unless it is there; return where. Raises `SyncError`.

    It counts once it is whole: one that was broken off is made again.
    """
    home = place()
    if (home / _READY).exists():
        return home
    shutil.rmtree(home, ignore_errors=True)
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        uv = shutil.which("uv") or shutil.which("uv", path=sysconfig.get_path("scripts"))
        # -I: the folder that the command runs in has no say in what is installed.
        pip = ["--without-pip"] if uv else []
        _run(sys.executable, "-I", "-m", "venv", *pip, str(home))
        lock = home / "requirements.lock"
        lock.write_text(_lock(), "utf-8")
        what = ["--no-deps", "--require-hashes", "-r", str(lock)]
        python = str(_python(home))
        if uv:
            _run(uv, "pip", "install", "-q", "--compile-bytecode", "--python", python, *what)
        else:
            _run(python, "-I", "-m", "pip", "install", "-q", *what)
        (home / _READY).touch()
    except OSError as error:
        raise SyncError(
            "connector",
            f"{home} can't be made: {error.strerror or error}.",
            remedy="Let XDG_CACHE_HOME name a folder that can be written, for Penstock's runs too.",
        ) from None
    return home


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - commands of ours alone
    if done.returncode:
        text = " ".join((done.stderr or done.stdout).split())[-600:]
        raise SyncError(
            "connector",
            f"The environment of airbyte-cdk can't be made: {text}",
            remedy=f"Repair that and run `{COMMAND}` again; or make an environment by yourself and let"
            f" {VARIABLE} name its Python.",
        )


def _python(home: Path) -> Path:
    return home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _host() -> str:
    return os.uname().nodename if hasattr(os, "uname") else "this host"
