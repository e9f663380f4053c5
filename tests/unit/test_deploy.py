"""The image, the compose file and the systemd unit name what is there: commands, ports, variables.

No daemon builds or runs anything here; `docs/how-to/production.md` has the commands that do.
"""

from __future__ import annotations

import configparser
import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.specifiers import SpecifierSet
from tests.metrics_help import Process

from penstock.api.health import application
from penstock.cli.common import LISTEN
from penstock.cli.main import app
from penstock.config.file import load
from penstock.config.settings import Config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PORT = LISTEN.rpartition(":")[2]
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
SERVICE_KEYS = {
    "build", "cap_drop", "command", "depends_on", "environment", "healthcheck", "image", "init",
    "ports", "read_only", "restart", "security_opt", "shm_size", "stop_grace_period", "tmpfs", "volumes",
}  # fmt: skip
"""Those that the file uses, all of them of the compose specification: a misspelt one is none of them."""


def dockerfile() -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage, with their text."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    stages: list[list[tuple[str, str]]] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stages.append([])
        stages[-1].append((name, " ".join(rest.split())))
    return stages


BUILD, IMAGE = dockerfile()


def instruction(name: str) -> str:
    """Return the last one of a name in the image's stage."""
    return [text for of, text in IMAGE if of == name][-1]


def accepted(arguments: list[str]) -> None:
    """Fail unless `penstock` takes these arguments."""
    commands = typer.main.get_group(app).commands
    commands[arguments[0]].make_context(arguments[0], arguments[1:])


def environment() -> dict[str, str]:
    """Return the variables that compose gives to Penstock, with a password filled in."""
    given = SERVICES["penstock"]["environment"]
    return {key: re.sub(r"\$\{POSTGRES_PASSWORD[^}]*\}", "secret", of) for key, of in given.items()}


@pytest.fixture(scope="module")
def config() -> Config:
    return load(DEPLOY / "penstock.yaml", environment())


def test_the_image_runs_a_command_that_there_is() -> None:
    assert json.loads(instruction("ENTRYPOINT")) == ["penstock"]
    arguments = json.loads(instruction("CMD"))
    accepted(arguments)
    assert arguments[-1] == f"0.0.0.0:{PORT}"
    assert instruction("EXPOSE") == PORT
    accepted(["warm"])
    assert ("RUN", "penstock warm") in IMAGE


def test_the_image_is_checked_at_an_endpoint_that_there_is() -> None:
    command = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
    (port, path) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", command[-1])[0]
    routes = {getattr(route, "path", "") for route in application(Process().state).routes}
    assert (port, path) == (PORT, "/healthz")
    assert path in routes
    compile(command[-1], "HEALTHCHECK", "exec")


def test_the_image_is_made_of_the_lock_and_runs_as_a_user_of_its_own() -> None:
    installs = [part for name, text in BUILD if name == "RUN" for part in text.split("&&")
                if " install " in part or " build " in part]  # fmt: skip
    assert len(installs) == 4
    for part in installs:
        from_lock = "--require-hashes" in part and (
            "requirements.lock" in part or "uv.lock" in part
        )
        assert from_lock or "--no-deps dist/" in " ".join(part.split()), part
    assert instruction("USER") == "penstock"
    assert "useradd" in " ".join(text for name, text in IMAGE if name == "RUN")
    for stage in (BUILD, IMAGE):
        version = re.fullmatch(r"python:(\d\.\d+)-slim(?: AS build)?", stage[0][1])
        assert version
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert f"{version[1]}.0" in SpecifierSet(project["requires-python"])
    assert not [text for name, text in (*BUILD, *IMAGE) if name in ("ENV", "ARG") and
                re.search("PASSWORD|SECRET|TOKEN|_URL", text)]  # fmt: skip


def test_the_image_copies_what_there_is_and_docker_sees() -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    seen = {rule[1:] for rule in rules if rule.startswith("!")}
    assert "*" in rules
    copied = [source for name, text in BUILD if name == "COPY" for source in text.split()[:-1]]
    assert copied
    assert set(copied) == seen
    for source in copied:
        assert (ROOT / source).exists(), source
        assert not fnmatch.fnmatch(source, "*__pycache__*")


def test_the_configuration_has_its_variables_and_loads(config: Config) -> None:
    assert config.sinks.keys() == {"jetstream", "changes"}
    text = (DEPLOY / "penstock.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"\$\{(\w+)", text)) == environment().keys()
    mounted = [of.split(":") for of in SERVICES["penstock"]["volumes"]]
    sources = {target: DEPLOY / source for source, target, *_ in mounted}
    assert sources["/etc/penstock/penstock.yaml"].resolve() == (DEPLOY / "penstock.yaml").resolve()
    assert json.loads(instruction("CMD"))[2] in sources
    assert instruction("WORKDIR") in sources
    assert instruction("VOLUME") == instruction("WORKDIR")


def test_the_services_find_each_other(config: Config) -> None:
    for name, service in SERVICES.items():
        assert service.keys() <= SERVICE_KEYS, name
        assert not service.get("image", "").endswith(":latest")
        for other in service.get("depends_on", ()):
            assert SERVICES[other]["healthcheck"]["test"][0] == "CMD"
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source.startswith(".") or source in COMPOSE["volumes"]
    of = environment()
    assert of["NATS_URL"] == "nats://nats:4222"
    postgres = SERVICES["postgres"]["environment"]
    login = (
        f"postgresql://{postgres['POSTGRES_USER']}:secret@postgres:5432/{postgres['POSTGRES_DB']}"
    )
    assert {of["DATABASE_URL"], of["PENSTOCK_STORE_URL"]} == {login}
    assert "wal_level=logical" in SERVICES["postgres"]["command"]
    assert "--jetstream" in SERVICES["nats"]["command"]
    monitoring = SERVICES["nats"]["command"][-1]
    assert f":{monitoring}/healthz" in SERVICES["nats"]["healthcheck"]["test"][-1]
    assert SERVICES["penstock"]["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # as configparser documents it
    parser.read(DEPLOY / "penstock.service")
    return parser


def test_the_unit_runs_a_command_that_there_is() -> None:
    service = unit()["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert program.endswith("/penstock")
    accepted(arguments)
    assert service["KillMode"] == "mixed"
    assert service["WorkingDirectory"] == f"/var/lib/{service['StateDirectory']}"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze: Debian's package `systemd` has it")
    text = (DEPLOY / "penstock.service").read_text(encoding="utf-8")
    copy = tmp_path / "penstock.service"
    copy.write_text(text.replace("/opt/penstock/bin/penstock", sys.executable), encoding="utf-8")
    done = subprocess.run(
        [analyze, "verify", str(copy)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
