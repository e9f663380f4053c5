"""A query that ends is started again: soon where there was progress, later each time where none was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.config.settings import Config
from penstock.core.backoff import Backoff
from penstock.core.errors import CaptureError
from penstock.core.health import Failure
from penstock.embedded.handles import Database
from penstock.outbox.relay.guard import RelayGuard
from penstock.runtime import source_query
from penstock.runtime.run import Run

REPORT = {"capture": "shop", "state": "streaming", "error": None, "code": None, "warm": True}
DELAY = 0.01


@pytest.fixture
def config(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(source_query, "_BACKOFF_SECONDS", (DELAY, 30.0))
    monkeypatch.setattr(source_query, "jvm_exit_code", lambda: None)
    return Config.model_validate(
        {
            "sources": {"shop": {"type": "postgres", "url": database.url}},
            "sinks": {"events": {"type": "stream", "source": "shop"}},
            "spark": {"checkpoint": str(tmp_path)},
        }
    )


@pytest.fixture
def run(config: Config, database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    with Run(config, database.url) as run:
        # Nothing is registered in the store.
        monkeypatch.setattr(run.store, "target", lambda _: None)
        monkeypatch.setattr(run._guard, "_note_gap", lambda *_: None)
        yield run


def restarts(run: Run, monkeypatch: pytest.MonkeyPatch, *queries: Any) -> list[dict[str, Any]]:
    """Have each of `queries` end by an error, then stop; return what was logged of them."""
    left = list(queries)

    class Query:
        name = "shop 1"

        def __init__(self, *_: object) -> None:
            pass

        def start(self, *, once: bool) -> None:
            ending = left.pop(0)
            if not left:
                run.stop()
            for report in ending if isinstance(ending, list) else ():
                run.state.update({**REPORT, **report})
            raise ending if isinstance(ending, Exception) else RuntimeError("Query ended.")

        def stop(self) -> None:
            pass

    monkeypatch.setattr(source_query, "Pipeline", Query)
    spark: Any = None
    with capture_logs() as logs:
        run._queries["shop"].keep(spark, "")
    return [dict(entry) for entry in logs if entry["event"].startswith("query ended")]


def delays(run: Run, monkeypatch: pytest.MonkeyPatch, *queries: Any) -> list[float]:
    """Have each of `queries` end by an error, then stop; return how long each restart waited."""
    found: list[float] = []
    after_failure = Backoff.after_failure

    def noted(backoff: Backoff, mark: Any) -> float:
        found.append(after_failure(backoff, mark))
        return found[-1]

    monkeypatch.setattr(Backoff, "after_failure", noted)
    # One reason is logged once, until the source streams again.
    assert len(restarts(run, monkeypatch, *queries)) == 1
    return found


def test_faults_with_progress_between_them_never_wait_for_long(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = [{"confirmed": 0}, {"confirmed": 7}]
    assert delays(run, monkeypatch, *[working] * 5) == [DELAY] * 4


def test_faults_without_progress_wait_longer_each_time(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = delays(run, monkeypatch, *[[{"confirmed": 0}]] * 5)
    assert waited == [DELAY, 2 * DELAY, 4 * DELAY, 8 * DELAY]


def test_the_reason_in_the_status_is_the_one_in_the_log(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = CaptureError("publication_missing", "It is gone.", remedy="Make it.")
    lost = {"error": "It is gone. Make it.", "code": "publication_missing", "remedy": "Make it."}
    # Raised where the query is planned; reported by its capture; and neither.
    for ending, error in (
        (gone, "It is gone. Make it."), ([lost], "It is gone. Make it."), ([], "Query ended."),
    ):  # fmt: skip
        run._stopping.clear()
        run._log._ended.clear()
        (entry,) = restarts(run, monkeypatch, ending, RuntimeError("the end"))
        found = run.state.as_json()["sources"]["shop"]
        assert entry["error"] == found["error"]
        assert entry["code"] == found["code"]
        assert entry["error"].startswith(error)
        assert found["restarts"] > 0
        for report in ({"state": "connecting", "warm": False}, {"warm": False}):
            run.state.update({**REPORT, **report})  # the next one begins
            assert run.state.as_json()["sources"]["shop"]["error"] == entry["error"]


def test_a_relays_run_ends_where_changes_are_missed(
    config: Config, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group begins anew, and reads what is missed from the outboxes' tables."""
    gone = CaptureError("publication_missing", "It is gone.", remedy="Make it.")
    with Run(config, database.url, guard=RelayGuard()) as run:
        monkeypatch.setattr(run.store, "target", lambda _: None)
        assert restarts(run, monkeypatch, gone, RuntimeError("not begun")) == []
    assert run.failure == Failure("publication_missing", "It is gone.", "Make it.")
    (part,) = run.parts()
    assert [problem.remedy for problem in part.problems] == ["Make it."]
