"""`penstock token`, `api` and `push` as a user runs them, and a store that is not to be had."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from penstock.config.settings import StoreSettings
from penstock.embedded.process import free_port
from penstock.embedded.store import open_store

from ..cli import SECRET, fails, listed, run, write
from ..pipeline import COMMAND, NO_TLS, PATIENCE, penstock
from ..waits import await_true


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where a user works: not pytest's own folder, which Postgres's user may not pass through."""
    with tempfile.TemporaryDirectory(prefix="penstock-test-", ignore_cleanup_errors=True) as path:
        yield Path(path)


# -- tokens, in the embedded store that every command starts for itself


def test_tokens(folder: Path) -> None:
    write(folder, "sources: {shop: {type: postgres, url: '${DATABASE_URL}'}}")  # needs no variable
    made = penstock("token", "create", "loader", cwd=folder)
    assert made.returncode == 0, made.stderr
    token = made.stdout.strip()  # so `TOKEN=$(penstock token create loader)` has it and no more
    assert token.startswith("pst_")
    assert len(token) >= 40
    assert "loader: worker, every consumer. It is not shown again." in made.stderr
    assert token not in made.stderr

    noted = penstock(
        "token", "create", "mailer", "--consumer", "mail", "--consumer", "post", cwd=folder
    )
    assert noted.returncode == 0
    assert "there is no consumer 'mail' so far" in noted.stderr
    run(folder, "token create root --role admin")
    found = listed(folder, "token list")
    assert [(t["name"], t["role"], t["consumers"]) for t in found] == [
        ("loader", "worker", None), ("mailer", "worker", ["mail", "post"]), ("root", "admin", None),
    ]  # fmt: skip
    assert token not in json.dumps(found)
    table = run(folder, "token list")
    assert "mail, post" in table
    assert token not in table

    assert "There is a token 'loader' already" in fails(folder, 1, "token create loader")
    assert "there is no token 'loadr'; did you mean loader?" in fails(
        folder, 1, "token revoke loadr"
    )
    assert "Revoked loader" in run(folder, "token revoke loader")
    assert "revoked already" in fails(folder, 1, "token revoke loader")
    assert listed(folder, "token list")[0]["revoked_at"] is not None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("", ), "'' is not a name"),
        (("a b", ), "'a b' is not a name: expected letters"),
        (("x", "--role", "amdin"), "expected worker, viewer or admin; did you mean admin?"),
        (("x", "--role", "admin", "--consumer", "y"), "leave --consumer out"),
    ],
)  # fmt: skip
def test_a_token_that_makes_no_sense(
    folder: Path, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in fails(folder, 1, "token create", *arguments)
    assert not (folder / ".penstock").exists()


# -- a store that is not to be had

COMMANDS = (
    "token list", "dead-letters list", "dead-letters replay --all", "dead-letters purge --yes",
    "api", "push",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_no_file(folder: Path, command: str) -> None:
    output = fails(folder, 2, command)
    assert output.startswith(
        "penstock.yaml: no such file: write one with `penstock init`, or name the store"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_the_variable_of_the_store_is_not_set(folder: Path, command: str) -> None:
    write(folder, "store: ${PENSTOCK_STORE_URL}")
    output = fails(folder, 2, command)
    assert (
        "penstock.yaml:1: store: the environment variable PENSTOCK_STORE_URL is not set" in output
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_runs_at_the_store(folder: Path, command: str) -> None:
    write(folder, "store: ${STORE}")
    url = f"postgresql://app:{SECRET}@127.0.0.1:{free_port()}/store"
    output = fails(folder, 1, command, STORE=url)
    assert "Store: Nothing answers at 127.0.0.1:" in output
    assert "Start Postgres there" in output


@pytest.mark.parametrize("url", ["mysql://app:{}@db/x", "postgresql://a:{}@b@c/x", "{}"])
def test_a_url_of_no_store(folder: Path, url: str) -> None:
    write(folder, "store: ${STORE}")
    output = fails(folder, 2, "token list", STORE=url.format(SECRET))
    assert output.startswith("penstock.yaml:1: store: ")
    assert "expected postgresql://user:password@host:port/database" in output


def test_a_wrong_password_is_reported_and_never_shown(folder: Path) -> None:
    write(folder, "store: ${STORE}")
    with open_store(StoreSettings(), folder / "store") as url:
        right = (folder / "store" / "store.password").read_text()
        for command in COMMANDS:
            output = fails(folder, 1, command, STORE=url.replace(right, SECRET))
            assert "refused the login of user postgres" in output
            assert "Check user and password" in output


# -- api and push, alone


@contextlib.contextmanager
def background(folder: Path, *arguments: str, event: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs on, from when it has logged `event`."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines = list(itertools.takewhile(lambda line: f'"{event}"' not in line, process.stderr))
        assert process.poll() is None, "".join(lines)
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


def stopped(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    return process.returncode


def ask(listen: str, token: str) -> int:
    return httpx.get(
        f"http://{listen}/v1/streams", headers={"Authorization": f"Bearer {token}"}, verify=NO_TLS
    ).status_code


def test_api_push_and_tokens_share_the_embedded_store(folder: Path) -> None:
    write(folder, "sources: {}")
    listen = f"127.0.0.1:{free_port()}"
    pid = folder / ".penstock" / "store" / "postmaster.pid"
    with (
        background(folder, "push", event="pushing") as push,
        background(folder, "api", "--listen", listen, event="serving") as api,
    ):
        token = run(folder, "token create admin --role admin").strip()
        await_true(lambda: ask(listen, token) == 200, what="the API knows the new token")
        assert ask(listen, token + "x") == 401
        assert stopped(push) == 0  # it came first, and the store stays for the other
        assert ask(listen, token) == 200
        run(folder, "token revoke admin")
        await_true(lambda: ask(listen, token) == 401, what="the API knows that it is revoked")
        killed = psutil.Process(int(pid.read_text().splitlines()[0]))
        killed.kill()  # the API that is left starts it again
        assert psutil.wait_procs([killed], 60)[1] == []
        await_true(
            lambda: (
                httpx.get(f"http://{listen}/readyz", verify=NO_TLS).status_code == 200
                and pid.exists()
            ),
            what="the store's server is started again",
        )
        token = run(folder, "token create again --role admin").strip()
        await_true(lambda: ask(listen, token) == 200, what="the API knows the new token")
        output = fails(folder, 1, "api --listen", listen)
        assert f"{listen}" in output
        assert "already in use" in output
        assert pid.exists()
        assert stopped(api) == 0
    assert not pid.exists()


def test_a_killed_api_takes_the_store_with_it(folder: Path) -> None:
    write(folder, "sources: {}")
    with background(folder, "api", "--listen", f"127.0.0.1:{free_port()}", event="serving") as api:
        lines = (folder / ".penstock" / "store" / "postmaster.pid").read_text().splitlines()
        postgres = psutil.Process(int(lines[0]))
        api.kill()
        assert psutil.wait_procs([postgres], 60)[1] == []
    assert listed(folder, "token list") == []
