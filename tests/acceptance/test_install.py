"""Penstock's wheel, installed where there is no Java, runs its demo: all is delivered, nothing left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest

from .test_demo import left_over

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "sh", "setsid", "chmod", "ls", "env", "ps", "locale", "getconf")


def built(folder: Path) -> Path:
    """Make a wheel of the pyspark that is installed here: to build it from its source takes long."""
    spark, place = distribution("pyspark"), folder / "built"
    place.mkdir()
    with ZipFile(place / f"pyspark-{spark.version}-py3-none-any.whl", "w") as wheel:
        for file in spark.files or ():
            if file.parts[0] != ".." and file.suffix != ".pyc":
                wheel.write(str(spark.locate_file(file)), str(file))
    return place


@pytest.mark.timeout(1200)
def test_the_wheel_in_an_empty_environment() -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-test-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)  # under root the servers in it run as another user
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = folder.glob("*.whl")
        venv.create(folder / "env", with_pip=True)
        place = folder / "env" / "bin"
        # Neither compiles: what the demo loads is compiled then, a tenth of what there is.
        ways = (
            [f"{sys.prefix}/bin/uv", "pip", "install", "--quiet", "--python", f"{place}/python"],
            [f"{place}/pip", "install", "--quiet", "--no-compile"],  # it takes twice the CPU
        )
        what = ("--find-links", str(built(folder)), str(wheel))
        assert any(
            subprocess.run([*way, *what], cwd=folder, timeout=600, check=False).returncode == 0
            for way in ways
        )
        tools = folder / "tools"
        tools.mkdir()
        for tool in TOOLS:
            if (found := shutil.which(tool)) is not None:
                (tools / tool).symlink_to(found)
        hidden = ("JAVA_HOME", "PYTHONPATH", "VIRTUAL_ENV", "PYSPARK_PYTHON")
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        done = subprocess.run(
            [str(place / "penstock"), "demo", "--duration", "8", "--rate", "300", "--json"],
            cwd=folder,
            # No cache can be made for this Java: it would take the cores from the next tests.
            env={**environment, "PATH": f"{place}:{tools}", "XDG_CACHE_HOME": os.devnull,
                 "TMPDIR": name},
            capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        left = left_over(folder)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["lost"], result["out_of_order"], result["unexpected"]) == (0, 0, 0)
    assert result["duplicates"] == 0  # nothing failed, so nothing had to be sent again
    # A busy machine may not reach the rate; what it does reach holds up to the end.
    assert result["delivered"] == result["committed"] >= 8 * result["rows_per_second"] * 0.8
    assert result["rows_per_second"] > 0
    assert 0 < result["latency_ms"]["p50"] <= result["latency_ms"]["p99"]
    for way in ("stream", "events", "records"):
        of = result[way]
        assert (of["lost"], of["out_of_order"], of["unexpected"]) == (0, 0, 0), way
        assert of["delivered"] == of["committed"], way
    # The customers that were there before, and those that were made, changed and deleted meanwhile.
    assert result["events"]["committed"] == result["records"]["committed"] > 40
    assert left == []
