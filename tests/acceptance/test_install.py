"""Penstock's wheel, installed where there is nothing else and no Java, runs its demo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "sh", "setsid", "chmod", "ls", "env", "ps", "locale", "getconf")


def install(wheel: Path, place: Path) -> None:
    """Install a wheel with all that it requires, by pip's own judgement.

    uv has the packages at hand with which this environment was made: pip takes minutes to get and unpack
    them. Where uv can't, pip does.
    """
    fetched = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(place / "python"),
         str(wheel)],
        env={key: value for key, value in os.environ.items() if key != "XDG_CACHE_HOME"},
        capture_output=True, timeout=400, check=False,
    )  # fmt: skip
    pip = [str(place / "pip"), "--disable-pip-version-check"]
    options = ["--no-index", "--force-reinstall", "--no-deps"] if fetched.returncode == 0 else []
    subprocess.run([*pip, "install", "--quiet", *options, str(wheel)], check=True, timeout=400)
    subprocess.run([*pip, "check"], check=True, capture_output=True)


def test_the_wheel_in_an_empty_environment() -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-test-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)  # under root the servers in it run as another user
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = folder.glob("*.whl")
        venv.create(folder / "env", with_pip=True)
        place = folder / "env" / "bin"
        install(wheel, place)
        tools = folder / "tools"
        tools.mkdir()
        for tool in TOOLS:
            if (found := shutil.which(tool)) is not None:
                (tools / tool).symlink_to(found)
        hidden = ("JAVA_HOME", "PYTHONPATH", "VIRTUAL_ENV", "PYSPARK_PYTHON")
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        done = subprocess.run(
            [str(place / "penstock"), "demo", "--duration", "2", "--rate", "100", "--json"],
            cwd=folder,
            # No cache can be made for this Java: it would take the cores from the next tests.
            env={**environment, "PATH": f"{place}:{tools}", "XDG_CACHE_HOME": os.devnull},
            capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["delivered"] == result["committed"] > 0
    assert (result["lost"], result["out_of_order"], result["unexpected"]) == (0, 0, 0)
