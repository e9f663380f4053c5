"""Spark's Python processes of a local session are forks of one, and end as processes of its own do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.pipeline import WORKER, runs
from tests.waits import await_true

from penstock.spark import fork_server, jvm

PATIENCE = 60.0
SESSION = """
import json, os, sys
from penstock.spark.session import create
from penstock.spark.pipeline import map_in_arrow
from penstock.spark.settings import local_master

def look(batches):
    import pyarrow, os, sys
    found = {
        "pid": os.getpid(), "seed": os.environ.get("PYTHONHASHSEED"), "hash": hash("a"),
        "comm": open("/proc/self/comm").read().strip(), "cwd": os.getcwd(),
        "stray": os.environ.get("STRAY"),
        "files": [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")],
    }
    for _ in batches:
        yield pyarrow.RecordBatch.from_pylist([{"t": json.dumps(found)}])

for line in sys.stdin:
    if line.strip() == "begin":
        from types import SimpleNamespace
        from penstock.spark import launch

        held = open("held", "w")  # which no fork is to have
        launch.begin(SimpleNamespace(spark=SimpleNamespace(master="local[1]", conf={})))
        launch.loaded()
        print(json.dumps({"begun": True}), flush=True)
        continue
    if line.strip() == "create":
        spark = create(local_master("local[1]"))
        print(json.dumps({"ready": True}), flush=True)
        continue
    if line.strip() == "end":
        spark.stop()
        break
    try:
        frame = map_in_arrow(spark.range(1, numPartitions=1), look, "t string")
        print(frame.toArrow()["t"][0].as_py(), flush=True)
    except Exception as error:
        print(json.dumps({"error": str(error)[:500]}), flush=True)
"""


class Session:
    """A process with a session, which answers a line by a line.

    The server is started in one `way` or the other: as a fork of the process, or as a program.
    """

    def __init__(self, folder: Path, way: str = "fork", **environment: str) -> None:
        code = folder / "session.py"
        code.write_text(SESSION)
        self.process = subprocess.Popen(
            [sys.executable, str(code)], cwd=folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(folder), **environment},
        )  # fmt: skip
        if way == "fork":
            assert self.ask("begin") == {"begun": True}
        assert self.ask("create") == {"ready": True}
        self.family = self.tree()

    def ask(self, line: str = "task") -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.process.communicate(timeout=PATIENCE)[1][-3000:]
        found: dict[str, Any] = json.loads(answer)
        return found

    def tree(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def named(self, part: str) -> list[psutil.Process]:
        found = []
        for process in self.tree():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if part in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def jvm(self) -> psutil.Process:
        (found,) = self.named("org.apache.spark.deploy.SparkSubmit")
        return found

    def server(self) -> psutil.Process:
        (found,) = [each for each in self.tree() if each.name() == fork_server.NAME]
        return found

    def daemon(self) -> psutil.Process:
        server = self.server().pid
        (found,) = [each for each in self.tree() if runs(each, WORKER) and each.ppid() == server]
        return found


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="forks-") as path:
        yield Path(path)


def left(family: list[psutil.Process]) -> list[psutil.Process]:
    return psutil.wait_procs(family, PATIENCE)[1]


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_task_runs_in_a_fork_and_all_end_with_the_session(folder: Path, way: str) -> None:
    session = Session(folder, way, STRAY="kept")
    task = session.ask()
    # As Spark has it: its variables, its folder.
    assert task["comm"] == "worker"
    assert task["seed"] == "0"
    assert task["stray"] == "kept"
    assert str(folder / "held") not in task["files"]
    assert Path(task["cwd"]) == folder
    assert psutil.Process(task["pid"]).ppid() == session.daemon().pid
    # Where a daemon is gone, with its workers, there is another one.
    for number in (signal.SIGTERM, signal.SIGKILL):
        gone = [session.daemon(), psutil.Process(session.ask()["pid"])]
        for process in gone:
            with contextlib.suppress(psutil.NoSuchProcess):  # a daemon's end may be its worker's
                process.send_signal(number)
        assert left(gone) == []
        await_true(lambda: "pid" in session.ask(), what="a worker of another daemon")
    family = session.tree()
    (program,) = folder.glob("penstock-jvm-*/python")
    assert session.process.stdin is not None
    session.process.stdin.write("end\n")
    session.process.stdin.flush()
    _, errors = session.process.communicate(timeout=PATIENCE)
    assert session.process.returncode == 0
    assert left(family) == []
    assert not program.parent.exists()
    assert errors == ""


def test_without_its_server_spark_starts_python(folder: Path) -> None:
    session = Session(folder, PYTHONHASHSEED="7")
    first = session.ask()
    assert first["seed"] == "7"
    daemon = session.daemon()
    session.server().kill()
    assert session.ask()["pid"] == first["pid"], "what is there goes on"
    gone = [daemon, psutil.Process(first["pid"])]
    for process in gone:
        process.kill()
    assert left(gone) == []
    await_true(lambda: session.ask().get("comm") == "python", what="a worker that is no fork of it")
    assert session.named(WORKER), "the client has become Python"
    family = session.tree()
    session.jvm().kill()
    session.process.kill()
    session.process.communicate(timeout=PATIENCE)
    assert left(family) == []


def test_forks_end_with_the_jvm_and_with_the_run(folder: Path) -> None:
    session = Session(folder)
    session.ask()
    family = session.tree()
    forks = [each for each in family if each not in (family[0], session.server(), session.jvm())]
    session.jvm().kill()
    assert left(forks) == []
    server = session.server()
    session.process.kill()
    session.process.communicate(timeout=PATIENCE)
    assert left([server]) == []
    assert list(folder.glob("penstock-jvm-*")) == []


def test_a_fork_ends_with_its_client(folder: Path) -> None:
    """As when Spark destroys the process that it has started."""
    session = Session(folder)
    session.ask()
    daemon = session.daemon()
    clients = session.named("fork_client.py")
    for client in clients:
        client.kill()
    assert left([daemon]) == []
    assert "pid" in session.ask()
    session.process.kill()
    session.process.communicate(timeout=PATIENCE)


class Server:
    """A server without Spark, and what it is asked to run."""

    def __init__(self, folder: Path) -> None:
        found = fork_server.prepare(folder)
        assert found is not None
        found.spawn()
        self.forks, self.program = found, found.program

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, *arguments], capture_output=True, text=True, timeout=PATIENCE,
            check=False, **options,
        )  # fmt: skip

    def end(self) -> None:
        os.close(self.forks._held)
        await_true(lambda: self.forks.ended)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="forks-") as path:
        server = Server(Path(path))
        yield server
        server.end()
        assert not Path(path).exists(), "it deletes its folder"
        Path(path).mkdir()


def test_a_module_runs_as_python_runs_it(server: Server, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(
        "import sys, os\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv[1:], os.getcwd(), os.environ['WHO'], sys.stdin.read())\n"
        "    print('an error', file=sys.stderr)\n"
        "    sys.exit(int(sys.argv[1]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "WHO": "é"}
    done = server.run("-m", "shown", "3", "x y", input="given", cwd=tmp_path, env=environment)
    assert done.stdout == f"['3', 'x y'] {tmp_path} é given\n"
    assert done.stderr == "an error\n"
    assert done.returncode == 3
    (tmp_path / "raises.py").write_text("1 / 0\n")
    done = server.run("-m", "raises", cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    (tmp_path / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    assert server.run("-m", "killed", env=environment).returncode == 137
    assert server.run("-c", "print(1)").stdout == "1\n", "what is no module runs in Python itself"


def test_what_a_client_does_wrong_stops_no_other(server: Server) -> None:
    address = str(Path(server.program).with_name("forks"))
    for sent in (b"", b"\0", b"\xff\xff\xff\x7f", b"\4\0\0\0xxxx"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)
            client.sendall(sent)
    assert server.run("-m", "this").returncode == 0
    assert not server.forks.ended


def test_where_a_server_can_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    assert fork_server.prepare(deep) is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)  # as a folder that runs no programs answers
        assert fork_server.prepare(Path(tempfile.mkdtemp(dir="/tmp"))) is None
    with monkeypatch.context() as patch:
        patch.setattr(fork_server, "_SHELL", str(tmp_path / "sh"))
        assert fork_server.prepare(tmp_path) is None
    (tmp_path / "forks").touch()  # so that no socket can be made there
    assert fork_server.prepare(tmp_path) is None


def test_another_python_of_the_users_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    assert jvm._runs_own_python()
    monkeypatch.setenv("PYSPARK_PYTHON", "/usr/bin/python3")
    assert not jvm._runs_own_python()
