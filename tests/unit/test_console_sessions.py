"""What needs no store: the CSRF token, where a login leads, refusals, history, figures."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request

from penstock.api.console.forms import Form
from penstock.api.console.guard import own_path, refusal
from penstock.api.console.render import render, seconds, size
from penstock.api.console.sessions import Session
from penstock.api.status import SAMPLES, History

SESSION = Session("abc")


def request(**headers: str) -> Request:
    given = [
        (k.replace("_", "-").encode(), v.encode()) for k, v in {"host": "a:1", **headers}.items()
    ]
    return Request({"type": "http", "headers": given, "method": "POST"})


def form(csrf: str = SESSION.csrf) -> Form:
    return Form({"csrf": [csrf]})


def test_a_form_of_the_session_itself_is_taken() -> None:
    assert refusal(request(), SESSION, form()) == ""
    assert refusal(request(origin="http://a:1"), SESSION, form()) == ""
    assert (
        refusal(request(sec_fetch_site="same-origin", origin="http://proxy"), SESSION, form()) == ""
    )
    assert refusal(request(x_csrf_token=SESSION.csrf), SESSION, Form()) == ""


@pytest.mark.parametrize("headers", [
    {"origin": "http://a:2"}, {"origin": "null"}, {"origin": "http://evil"},
    {"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site", "origin": "http://a:1"},
])  # fmt: skip
def test_one_of_another_site_is_not(headers: dict[str, str]) -> None:
    assert "another site" in refusal(request(**headers), SESSION, form())


def test_nor_is_one_of_another_session() -> None:
    assert refusal(request(), SESSION, form(Session("abd").csrf))
    assert refusal(request(), SESSION, Form())
    assert SESSION.id not in SESSION.csrf


@pytest.mark.parametrize(("wanted", "path"), [
    ("/console/tokens?q=a", "/console/tokens?q=a"), ("/console", "/console"), ("", "/console"),
    ("//evil", "/console"), ("https://evil/console/", "/console"), ("/console/\\\\evil", "/console"),
    ("/console/a\r\nb", "/console"), ("/console/logout", "/console"), ("/consolex", "/console"),
])  # fmt: skip
def test_a_login_leads_to_the_console_alone(wanted: str, path: str) -> None:
    assert own_path(wanted) == path


def test_templates_escape_whatever_their_names() -> None:
    text = render("error.html", status=404, cause="<script>'\"", session=None)
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def status(delivered: int, **sources: int) -> dict[str, Any]:
    of = {
        name: {"captured": n, "oldest_waiting_seconds": 1.5, "deliveries": n // 10,
               "delivery_seconds": n / 40} for name, n in sources.items()
    }  # fmt: skip
    sink = {"delivered": delivered, "backlog": 3}
    return {"sinks": {"a": sink}, "nats_consumers": {}, "sources": of,
            "consumers": {"c": {"lag_messages": 4, "lag_seconds": 2.0}}}  # fmt: skip


def test_the_hour_has_rates_and_gauges_and_a_bound() -> None:
    history = History()
    history.note(status(100, shop=200), 1000.0)
    history.note(status(150, shop=210), 1005.0)
    history.note(status(0, shop=220), 1010.0)  # the sink began anew
    assert history.as_json() == {
        "at": [1000.0, 1005.0, 1010.0],
        "captured_per_second": [None, 2.0, 2.0],
        "delivered_per_second": [None, 10.0, None],
        "latency_seconds": [None, 0.25, 0.25],
        "lag_messages": [7, 7, 7],
        "lag_seconds": [2.0, 2.0, 2.0],
        "waiting_seconds": [1.5, 1.5, 1.5],
    }
    history.note(status(0, shop=220), 1015.0)
    history.note(status(0, shop=100), 1020.0)
    assert history.as_json()["latency_seconds"][3:] == [None, None]  # nothing new; it began anew
    for i in range(SAMPLES + 5):
        history.note(status(i), 2000.0 + i)
    assert {len(values) for values in history.as_json().values()} == {SAMPLES}


def test_figures_are_readable() -> None:
    assert [seconds(s) for s in (0.04, 9.94, 12.4, 119, 125, 86_400, 200_000)] == [
        "0.0 s", "9.9 s", "12 s", "119 s", "2 min", "24 h", "2 d"
    ]  # fmt: skip
    assert [size(n) for n in (0, 1023, 1536, 5 * 2**40)] == ["0 B", "1023 B", "1.5 KiB", "5.0 TiB"]
