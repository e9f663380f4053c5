"""The fault "configuration: changed": sinks and consumers come, change and go while the load runs.

Each round of it makes a sink, a NATS consumer and a pull consumer, changes filters there and back,
pauses and rewinds, and removes some of what it has made, through the management API. The last change
of a round is not waited for: the next fault may meet it half done. The sink of the file is judged as
ever, and has all that was committed. What the others must have of that is noted with each change
(`Expected`).
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Final

import psycopg

from penstock.core.message import parse_lsn
from penstock.embedded.handles import Database, JetStream

from ..pipeline import PATIENCE, Penstock, penstock
from .expected import Expected
from .writer import TABLES

SOURCE: Final = "chaos"
_EVENTS: Final = "changes"
"""A stream of its own: `events` is that of the syncs."""
_COPY: Final = "copy"
_EFFECT_SECONDS: Final = 400.0
_ONE_TABLE: Final = "metadata.table_name = 'even'"

Request = tuple[str, str, Mapping[str, Any] | None]
"""A method, a path behind /v1/, and a body."""


class Changes:
    """Changes the configuration of a run, and knows what comes of it for whom."""

    def __init__(self, run: Penstock, database: Database, nats: str, chance: random.Random) -> None:
        self._run = run
        self._database = database
        self._nats = nats
        self._random = chance
        self._token = ""
        self._rounds = self._changes = 0
        self.streams: JetStream | None = None
        """Makes their JetStream streams, which it deletes when it is closed."""
        self.made: dict[str, Expected] = {}
        """What was made, by name, also if it was removed since."""
        self._pull: dict[str, Expected] = {}

    def __call__(self) -> None:
        """Do one round; raises `AssertionError` where a change does not take effect."""
        self._rounds += 1
        n = self._rounds
        if not self._token:
            self._token = self._new_token()
            self._add_stream(_COPY)
            self._begin()
        sink, mail, pull = f"x{n}", f"m{n}", f"w{n}"
        self._add_stream(sink)
        self._add_sink(sink)
        self._pause_briefly()
        self._ask("POST", f"nats-consumers/{_COPY}/pause")
        self._narrow(sink, mail, pull)
        self._pause_briefly()
        steps: list[Callable[[], object]] = [
            lambda: self._ask("POST", f"nats-consumers/{_COPY}/resume"),
            lambda: self._ask("POST", f"nats-consumers/{_COPY}/rewind", {"to": "all"}),
            lambda: self._widen(sink, mail),
        ]
        self._random.shuffle(steps)
        for step in steps:
            step()
            self._pause_briefly()
        self._ask("POST", f"nats-consumers/{_COPY}/resume")
        gone = self._random.sample([sink, mail, pull], self._random.randint(1, 2))
        self._remove(gone)

    def end(self) -> None:
        """Wait until all that was made has what it must have; then read the pull consumers."""
        if not self._rounds:
            return
        self._ask("POST", f"nats-consumers/{_COPY}/resume")
        self._confirm(self._lsn(), at_rest=True)
        left: list[str] = []

        def attached() -> bool:
            left[:] = self._behind()
            return not left

        try:
            self._await(attached, "all attached")
        except AssertionError as error:
            raise AssertionError(f"{error}: {', '.join(left)}") from None
        for name, expected in self._pull.items():
            if not expected.removed:
                expected.got = self._receive_all(name)

    def streamed(self) -> int:
        """Return where the stream ends that was made beside the file's sink; else raises."""
        code, body = self._send("GET", f"streams/{_EVENTS}")
        assert code == 200, body
        return int(json.loads(body)["head"]["lsn"])

    # -- what changes

    def _begin(self) -> None:
        """Make a stream, and a NATS consumer of it that stays."""
        at = self._confirmed()
        sink = {"type": "stream", "source": SOURCE}
        self._ask("PUT", f"sinks/{_EVENTS}", sink)
        self._ask("PUT", f"consumers/{_COPY}", self._consumer(_COPY))
        self.made[_COPY] = Expected(_COPY)
        self._effect(at, lambda since: self.made[_COPY].mark(since, "must"))
        self._events = self.made[_COPY].marks_of(TABLES[0])

    def _add_sink(self, name: str) -> None:
        at = self._confirmed()
        spec = {
            "type": "nats", "source": SOURCE, "url": self._nats,
            "subject": f"{name}.{{table}}.{{action}}",
        }  # fmt: skip
        self._ask("PUT", f"sinks/{name}", spec)
        expected = self.made[name] = Expected(name)
        self._effect(at, lambda since: expected.mark(since, "must"))

    def _narrow(self, sink: str, mail: str, pull: str) -> None:
        """Have a sink take one table alone; make a NATS consumer of one table, and a pull consumer."""
        even, odd = TABLES
        at = self._confirmed()
        self.made[sink].mark(at, "may", odd)
        wants = {"subjects": [f"{mail}.>"], "duplicate_window": "2h"}
        spec = self._consumer(
            mail, filters={"table": [even]}, create_stream=True, stream_config=wants
        )
        self._ask("PUT", f"consumers/{mail}", spec)
        self._ask("PUT", f"consumers/{pull}", {"type": "pull", "stream": _EVENTS})
        self._ask("PATCH", f"sinks/{sink}", {"filter": _ONE_TABLE})
        # Both begin with what the stream holds.
        expected = self.made[mail] = Expected(mail.upper(), self._events)
        expected.mark(0, "not", odd)
        self._pull[pull] = Expected(pull, self._events)

        def effect(since: int) -> None:
            self.made[sink].mark(since, "not", odd)

        self._effect(at, effect)

    def _widen(self, sink: str, mail: str) -> None:
        """Let both tables through again."""
        odd = TABLES[1]
        # Behind the head, new filters count from where the consumer is.
        self._await(lambda: self._state(mail) == "attached", f"{mail} attached")
        at = self._confirmed()
        self.made[sink].mark(at, "may", odd)
        self.made[mail].mark(at, "may", odd)
        self._ask("PATCH", f"sinks/{sink}", {"filter": None})
        self._ask("PATCH", f"consumers/{mail}", {"filters": {"table": list(TABLES)}})

        def effect(since: int) -> None:
            self.made[sink].mark(since, "must", odd)
            self.made[mail].mark(since, "must", odd)

        self._effect(at, effect)

    def _remove(self, names: list[str]) -> None:
        """Remove some of what was made; it is not waited for."""
        at = self._confirmed()
        for name in names:
            expected = self._pull.get(name) or self.made[name]
            expected.removed = True
            expected.mark(at, "may")
            kind = "sinks" if name.startswith("x") else "consumers"
            self._ask("DELETE", f"{kind}/{name}")

    def _consumer(self, name: str, **more: Any) -> dict[str, Any]:
        return {
            "type": "nats", "stream": _EVENTS, "url": self._nats,
            "subject": f"{name}.{{table}}.{{action}}", **more,
        }  # fmt: skip

    def _effect(self, at: int, mark: Callable[[int], None]) -> None:
        """Wait until what was changed behind `at` counts; call `mark` with from where it surely does.

        A consumer that gets nothing comes with it, in the place of the one before: the run shows it once
        the earlier run has left the slot.
        """
        self._changes += 1
        marker = f"t{self._changes}"
        if self._changes > 1:
            self._ask("DELETE", f"consumers/t{self._changes - 1}")
        self._ask("PUT", f"consumers/{marker}", self._consumer(marker, filters={"table": "none"}))
        self._await(
            lambda: marker in self._run.status().get("nats_consumers", {}),
            f"change {self._changes} in effect",
        )
        since = self._lsn()
        assert since >= at
        mark(since)

    # -- what is known of the run

    def _shown(self, name: str) -> dict[str, Any] | None:
        code, body = self._send("GET", f"nats-consumers/{name}")
        return json.loads(body) if code == 200 else None

    def _state(self, name: str) -> str | None:
        found = self._shown(name)
        return None if found is None or found["rewinding"] else str(found["state"])

    def _behind(self) -> list[str]:
        """Return what is not attached, or not known."""
        code, body = self._send("GET", "nats-consumers?limit=1000")
        if code != 200:
            return [f"the consumers: {code} {body[:200]}"]
        consumers = json.loads(body)["data"]
        found = [of["name"] for of in consumers if of["state"] != "attached" or of["rewinding"]]
        sinks = self._run.status().get("sinks", {})
        found += [name for name, of in sinks.items() if of["state"] != "attached"]
        return found if sinks else ["the sinks: no status"]

    def _lsn(self) -> int:
        """Return where the database's WAL ends: what commits from now on lies behind it."""
        found: list[int] = []

        def read() -> bool:
            with (
                contextlib.suppress(psycopg.OperationalError),
                psycopg.connect(self._database.url, connect_timeout=5) as connection,
            ):
                query = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint"
                ((lsn,),) = connection.execute(query)
                found.append(lsn)
            return bool(found)

        self._await(read, "the end of the WAL read")
        return found[0]

    def _confirmed(self) -> int:
        """Return a position up to which all sinks have all, by what was configured until now."""
        at = self._lsn()
        self._confirm(at)
        return at

    def _confirm(self, lsn: int, *, at_rest: bool = False) -> None:
        def confirmed() -> bool:
            source = self._run.status().get("sources", {}).get(SOURCE, {})
            if at_rest and source.get("state") == "streaming" and source.get("waiting") == 0:
                return True
            text = source.get("confirmed_lsn")
            return text is not None and parse_lsn(text) >= lsn

        self._await(confirmed, "all confirmed")

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        deadline, pause = time.monotonic() + _EFFECT_SECONDS, threading.Event()
        while not condition():
            assert time.monotonic() < deadline, f"not {what} after {_EFFECT_SECONDS:g} s"
            pause.wait(0.1)

    def _pause_briefly(self) -> None:
        threading.Event().wait(self._random.uniform(0, 1))

    # -- the API

    def _new_token(self) -> str:
        made = penstock("token", "create", "chaos", "--role", "admin", cwd=self._run.folder)
        assert made.returncode == 0, made.stderr
        return next(word for word in made.stdout.split() if word.startswith("pst_"))

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> str:
        """Have a request answered, however long the run is away; each may come twice."""
        answers: list[tuple[int, str]] = []

        def answered() -> bool:
            answers.append(self._send(method, path, body))
            code = answers[-1][0]
            return 200 <= code < 300 or (method == "DELETE" and code == 404)

        try:
            self._await(answered, f"{method} {path} answered")
        except AssertionError as error:
            raise AssertionError(f"{error}: {answers[-1]}") from None
        return answers[-1][1]

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, str]:
        request = urllib.request.Request(
            f"http://{self._run.listen}/v1/{path}", method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def _receive_all(self, consumer: str) -> list[dict[str, Any]]:
        """Return all that a pull consumer hands out, acked."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            path = f"consumers/{consumer}/receive?batch_size=1000&wait_for_ms=1000"
            answer = json.loads(self._ask("POST", path))
            if not answer["data"]:
                return found
            found += answer["data"]
            tokens = [message["ack_token"] for message in answer["data"]]
            self._ask("POST", f"consumers/{consumer}/ack", {"ack_tokens": tokens})
        raise AssertionError(f"consumer {consumer} is not drained after {PATIENCE:g} s")

    @property
    def pulled(self) -> Mapping[str, Expected]:
        """What the pull consumers must have, and what they had."""
        return {name: of for name, of in self._pull.items() if not of.removed}

    def _add_stream(self, name: str) -> None:
        streams = self.streams
        assert streams is not None

        def added() -> bool:
            with contextlib.suppress(Exception):  # the server may be coming up
                streams.add_stream(name, f"{name}.>", duplicate_window=7200)
                return True
            return False

        self._await(added, f"stream {name} made")
