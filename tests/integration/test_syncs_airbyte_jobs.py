"""Streams of type airbyte that are jobs of the API: made, waited for, and read to their end."""

from __future__ import annotations

import gzip
import json
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import psutil
import psycopg
import pytest
from requests.adapters import HTTPAdapter
from tests.airbyte_help import TOKEN, Read, airbyte_cdk, workers  # noqa: F401 - a fixture is among them
from tests.loopback_api import Answer, Asked, LoopbackApi

from penstock.embedded.handles import Database
from penstock.syncs.airbyte import environment, process
from penstock.syncs.connectors.contract import Kind
from penstock.syncs.errors import SyncError
from penstock.syncs.jobs import Ended, Job, report_of
from penstock.syncs.lane import JobClient, JobLane
from penstock.syncs.records import schema

MANIFEST: Final = Path(__file__).parents[1] / "airbyte_jobs.yaml"
PATIENCE: Final = 60.0
IDS: Final = ["0", "1", "2", "3", "4", "5"]


class Api:
    """Each job has two files, at another address, of what has changed between two times.

    `statuses` are the next ones that it answers of a job; behind them, it is done.
    """

    def __init__(self) -> None:
        self.objects = [
            {"id": str(i), "updated_at": f"2026-0{1 + i // 2}-10T00:00:0{i}Z"} for i in range(6)
        ]
        self.jobs: list[dict[str, str]] = []
        self.statuses: list[str] = []
        self.failures: dict[str, Answer] = {}
        self.is_csv = False
        self.requests = 0
        self.files = ""

    def status(self, job: int) -> str:
        return self.statuses.pop(0) if self.statuses else "done"

    def __call__(self, asked: Asked) -> Answer:
        assert asked.headers["authorization"] == f"Bearer {TOKEN}"
        self.requests += 1
        assert self.requests < 100, "it is asked again and again"
        if (failure := self.failures.get(f"{asked.method} {asked.path}")) is not None:
            return failure
        if asked.path == "/jobs":
            self.jobs.append(asked.json if asked.body else {"of": "", "to": "9"})
            return Answer({"id": len(self.jobs)})
        if asked.method == "POST":
            return Answer({})
        job = int(asked.path.split("/")[2])
        files = [f"{self.files}/{job}/{part}?signature=hush-signature" for part in range(2)]
        return Answer({"status": self.status(job), "files": files})

    def file(self, asked: Asked) -> Answer:
        assert "authorization" not in asked.headers
        if (failure := self.failures.get(asked.path)) is not None:
            return failure
        job, part = map(int, asked.path.split("/")[1:])
        of = self.jobs[job - 1]
        found = [each for each in self.objects if of["of"] <= each["updated_at"] <= of["to"]]
        if self.is_csv:
            lines = [f"{each['id']},{each['updated_at']}" for each in found[part::2]]
            return Answer("\n".join(["id,updated_at", *lines]).encode(), headers=CSV)
        lines = [json.dumps(each) for each in found[part::2]]
        return Answer(gzip.compress("\n".join(lines).encode()), headers=BYTES)


CSV: Final = {"Content-Type": "text/csv"}
BYTES: Final = {"Content-Type": "application/octet-stream"}


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def files(api: Api) -> Iterator[LoopbackApi]:
    with LoopbackApi(api.file) as found:
        api.files = found.url
        yield found


@pytest.fixture
def server(api: Api, files: LoopbackApi) -> Iterator[LoopbackApi]:
    with LoopbackApi(api) as found:
        yield found


def reading(server: LoopbackApi, **more: Any) -> Read:
    return Read(server.url, manifest={"file": str(MANIFEST)}, **more)


def requests_of(server: LoopbackApi) -> list[str]:
    return [f"{asked.method} {asked.path}" for asked in server.asked]


def test_a_job_is_read_to_its_end(api: Api, server: LoopbackApi, files: LoopbackApi) -> None:
    read = reading(server)
    api.statuses = ["new", "running"]
    ids, cursor = read.ids("events")
    assert sorted(ids) == IDS
    asked = requests_of(server)
    assert asked == ["POST /jobs", *["GET /jobs/1"] * 3, "POST /jobs/1/delete"]
    assert [each.path for each in files.asked] == ["/1/0", "/1/1"]
    # All of them count, and between two looks at the job nothing is done.
    assert read.budget.requests == len(server.asked) + len(files.asked) == 7
    assert read.waits == [5.0, 5.0]

    api.objects.append({"id": "6", "updated_at": "2026-04-01T00:00:00Z"})
    ids, _ = read.ids("events", Kind.POLL, cursor)
    assert api.jobs[1]["of"] == "2026-03-09T23:59:05Z"
    assert sorted(ids) == ["4", "5", "6"]
    assert read.waits == [5.0, 5.0], "a job that is done is not waited for"


def test_files_of_csv(api: Api, server: LoopbackApi) -> None:
    api.is_csv = True
    assert sorted(reading(server).ids("tables")[0]) == IDS
    (worker,) = workers()
    folder = Path(psutil.Process(worker).cwd())
    assert folder.name.startswith("penstock-airbyte-")
    assert not list(folder.iterdir())
    process.PROCESSES.close()
    assert not folder.exists()


def test_a_folder_goes_where_penstock_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a file").touch()
    command = [str(environment.interpreter()), "-I", str(process._WORKER), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as child:
        assert child.wait(PATIENCE) == 0
    assert not folder.exists()


def test_jobs_that_are_done_are_not_made_again(api: Api, server: LoopbackApi) -> None:
    api.is_csv = True
    pages = reading(server).pages("months")
    resumes = []
    for page in pages:
        resumes.append(page.resume)
        if len(api.jobs) == 2:
            break
    pages.close()
    assert resumes[-1] is not None, "it is there before the next job is done"
    left = list(reading(server).pages("months", resume=resumes[-2]))
    assert sorted(r.upstream_id for page in left for r in page.records) == IDS[2:]
    assert [job["of"][:7] for job in api.jobs] == ["2026-01", "2026-02", "2026-02", "2026-03"]
    assert left[-1].cursor == {
        "airbyte": {"value": "2026-03-10T00:00:05Z", "from": "2026-03-09T23:59:05Z"}
    }


@pytest.mark.parametrize(
    ("status", "code", "text", "remedy"),
    [
        ("failed", "unavailable", 'failed in each of its tries: {"status": "failed",', "why it fails"),
        ("late", "timed_out", "was not done in time in any of its tries.", "raise polling_job_timeout"),
    ],
)  # fmt: skip
def test_a_job_that_fails(
    api: Api, server: LoopbackApi, status: str, code: str, text: str, remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    api.is_csv = True
    monkeypatch.setattr(
        api, "status", lambda job: status if api.jobs[job - 1]["of"] > "2026-03" else "done"
    )
    resumes: list[Any] = []
    pages = reading(server).pages("months")
    with pytest.raises(SyncError) as error:
        resumes.extend(page.resume for page in pages)
    found = error.value
    part = "start_time 2026-03-01T00:00:00Z, end_time 2026-04-01T00:00:00Z"
    assert f"The API's job for {part} {text}" in found.message
    assert "hush" not in found.message
    assert (found.code, found.transient, found.retry_after) == (code, True, 60.0)
    assert remedy in found.remedy
    assert len(api.jobs) == 5
    aborted = [asked for asked in requests_of(server) if asked.endswith("/abort")]
    assert len(aborted) == (3 if status == "late" else 0)

    monkeypatch.undo()
    left = list(reading(server).pages("months", resume=resumes[-1]))
    assert [r.upstream_id for page in left for r in page.records] == IDS[4:]
    assert len(api.jobs) == 6


def test_files_that_are_refused_behind_a_job_that_fails(api: Api, server: LoopbackApi) -> None:
    api.is_csv = True
    api.statuses = ["done", "failed", "failed", "failed"]
    api.failures = {"/5/1": Answer({"message": "no"}, 403)}
    with pytest.raises(SyncError) as error:
        reading(server).ids("months")
    assert error.value.code == "forbidden"


@pytest.mark.parametrize(
    ("where", "answer", "code", "text"),
    [
        ("POST /jobs", Answer({"message": "no"}, 403), "forbidden", "answers 403: no"),
        ("GET /jobs/1", Answer({"message": "gone"}, 404), "not_found", "answers 404: gone"),
        ("GET /jobs/1", Answer({"status": "odd"}), "connector", "API status `odd` is unknown"),
    ],
)
def test_a_request_that_fails_ends_the_read(
    api: Api, server: LoopbackApi, where: str, answer: Answer, code: str, text: str
) -> None:
    api.failures = {where: answer, "POST /jobs/1/abort": Answer({"message": "later"}, 503)}
    read = reading(server)
    with pytest.raises(SyncError, match=text) as error:
        read.ids("events")
    assert error.value.code == code
    # It is asked once, and so is the API to abort the job.
    expected = ["POST /jobs", "GET /jobs/1", "POST /jobs/1/abort"]
    assert requests_of(server) == (expected if where != "POST /jobs" else expected[:1])
    assert not read.waits
    api.failures = {}
    assert sorted(read.ids("events")[0]) == IDS


def test_files_at_private_addresses_are_refused(
    api: Api, server: LoopbackApi, files: LoopbackApi
) -> None:
    read = reading(server, allow_private=False)
    read.session.http.mount(server.url, HTTPAdapter())  # the API itself is allowed
    with pytest.raises(SyncError) as error:
        read.ids("events")
    assert error.value.code == "private_address"
    assert len(api.jobs) == 1
    assert not files.asked


def test_a_check_waits_for_no_job(api: Api, server: LoopbackApi) -> None:
    read = reading(server)
    api.statuses = ["running"]
    read.connector.check(read.session)
    assert requests_of(server) == ["POST /jobs", "GET /jobs/1", "POST /jobs/1/abort"]
    assert not read.waits


def test_a_process_that_is_ended_in_a_job(api: Api, server: LoopbackApi) -> None:
    read = reading(server)
    api.statuses = ["running"] * 9

    def end(_: float) -> None:
        (pid,) = workers()
        psutil.Process(pid).send_signal(signal.SIGTERM)

    read.session.wait = end  # type: ignore[method-assign,assignment]  # for the test
    with pytest.raises(SyncError) as error:
        read.ids("events")
    assert (error.value.code, error.value.transient) == ("unavailable", True)
    api.statuses.clear()
    assert sorted(read.ids("events")[0]) == IDS
    assert len(api.jobs) == 2


class Lane:
    """A lane as an executor has it, whose requests are granted at once."""

    def __init__(self, url: str, client: JobClient) -> None:
        self.ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._lane = JobLane(url, url, 1, self._take)
        self._lane.define(1, client)
        self.close: Callable[[], None] = self._lane.close

    def read(self, sync: str) -> None:
        self._lane.give(1, Job(1, sync, "crm:events", Kind.BACKFILL))

    def _take(self, fields: list[Any]) -> None:
        if fields[0] == "ask":
            self._lane.grant(fields[2])
        elif fields[0] == "ended":
            report = report_of(fields)
            assert isinstance(report, Ended)
            self.ended.put(report)


def test_a_run_that_stops_in_a_job(
    api: Api,
    server: LoopbackApi,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    schema.prepare(database.url)
    asked = threading.Event()

    def status(_: int) -> str:
        asked.set()
        return "running"

    settings, sync = reading(server).settings, str(uuid4())
    client = JobClient("key", "crm", settings, {"secret": TOKEN}, SyncError("credential", "none"))
    monkeypatch.setattr(api, "status", status)
    lane = Lane(database.url, client)
    lane.read(sync)
    assert asked.wait(PATIENCE)
    lane.close()
    ended = lane.ended.get(timeout=PATIENCE)
    assert (ended.yielded, ended.problem) == (True, None)

    monkeypatch.undo()
    lane = Lane(database.url, client)
    lane.read(sync)
    ended = lane.ended.get(timeout=PATIENCE)
    lane.close()
    assert (ended.yielded, ended.problem) == (False, None)
    # Another job was made, for all of it.
    assert [job["of"] for job in api.jobs] == ["2026-01-01T00:00:00Z"] * 2
    with psycopg.connect(database.url) as connection:
        rows = connection.execute(
            "SELECT upstream_id FROM penstock.records WHERE sync_id = %s ORDER BY 1", [sync]
        ).fetchall()
    assert [row[0] for row in rows] == IDS
    assert "Traceback" not in "".join(capfd.readouterr())
