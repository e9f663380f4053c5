"""`penstock run`, `penstock api` and `penstock push`, processes of their own, see one configuration."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError

import pytest

from penstock.embedded.handles import Database

from ..api_help import until_a_place_is_taken
from ..cli import run
from ..pipeline import PATIENCE, Penstock
from ..waits import Later, await_true
from .api import Api
from .test_ids import webhook


def test_each_takes_up_what_another_was_asked(tmp_path: Path, database: Database) -> None:
    """All requests go to `api`; the webhook goes on by `push` where the run has ended."""
    database.execute("CREATE TABLE items (id bigint PRIMARY KEY)")
    (tmp_path / "penstock.yaml").write_text(f"store: {database.url}\n")
    with ExitStack() as stack:
        url, posted = stack.enter_context(webhook())
        other, later = stack.enter_context(webhook())
        folders = {name: tmp_path / name for name in ("run", "api", "push")}
        for folder in folders.values():
            folder.mkdir()
        options = ("-c", str(tmp_path / "penstock.yaml"))
        pipeline, serves, pushes = (
            stack.enter_context(Penstock(folder, *options, command=name)).start()
            for name, folder in folders.items()
        )
        pipeline.wait_ready()
        token = run(tmp_path, "token create ops --role admin").split()[-1]
        api = Api(serves, token)
        serves.wait_for(lambda: serves.get("/healthz")[0] == 200, PATIENCE, "served")
        api("PUT", "/v1/sources/shop", {"type": "postgres", "url": database.url})
        api("PUT", "/v1/sinks/events", {"type": "stream", "source": "shop"})
        hook = {"type": "webhook", "stream": "events", "url": url, "allow_private": True}
        api("PUT", "/v1/consumers/hook", hook)
        pipeline.wait_for(
            lambda: "events" in pipeline.status().get("sinks", {}), PATIENCE, "the sink"
        )
        pipeline.wait_ready()
        database.execute("INSERT INTO items VALUES (1)")
        pipeline.wait_for(lambda: bool(posted), PATIENCE, "posted")
        _share_max_waiting(api, Api(pipeline, token), database)
        assert pipeline.stop() == 0
        api("PATCH", "/v1/consumers/hook", {"url": other})
        api("POST", "/v1/http-consumers/hook/rewind", {"to": "all"})
        pushes.wait_for(lambda: bool(later), PATIENCE, "posted by push")
        assert [message["record"] for message in (*posted, *later)] == [{"id": 1}, {"id": 1}]
        api("DELETE", "/v1/consumers/hook")
        api("POST", "/v1/http-consumers", {**hook, "name": "again", "url": other})
        pushes.wait_for(lambda: len(later) == 2, PATIENCE, "posted for another")
        assert later[-1]["metadata"]["consumer"]["name"] == "again"
        assert len(posted) == 1


def _share_max_waiting(one: Api, other: Api, database: Database) -> None:
    """While a worker waits at one process, the other refuses; what wakes it comes by the other."""
    one(
        "PUT", "/v1/consumers/jobs", {"stream": "events", "deliver_policy": "new", "max_waiting": 1}
    )
    path = "/v1/consumers/jobs/receive"
    other("GET", "/v1/streams")  # it knows the token
    waiting = Later(lambda: other("GET", f"{path}?wait_for_ms=25000"))
    until_a_place_is_taken(database.url, "jobs")
    with pytest.raises(HTTPError) as refused:
        one("GET", path)
    assert (refused.value.code, refused.value.headers["retry-after"]) == (429, "1")
    one("POST", "/v1/http-consumers/jobs/rewind", {"to": "all"})
    (message,) = waiting.result()["data"]
    assert message["record"] == {"id": 1}
    await_true(lambda: _gets_nothing(one, path), what="the place is free for the other")


def _gets_nothing(api: Api, path: str) -> bool:
    try:
        return bool(api("GET", path)["data"] == [])
    except HTTPError as error:
        if error.code != 429:
            raise
        return False
