"""Logging in at the console, in a real browser and by hand: sessions, headers, CSRF, roles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta

import httpx
import pytest
from tests.api_help import ApiServer, Shop
from tests.browser import Window
from tests.waits import await_true

from penstock.api.console.sessions import COOKIE, Sessions

CSRF = re.compile(r'name="csrf" value="([0-9a-f]{64})"')


@pytest.fixture
def client(console: ApiServer) -> Iterator[httpx.Client]:
    """A client that keeps cookies as a browser does, and has no token."""
    with console.as_bearer(None) as client:
        yield client


def login(client: httpx.Client, token: str, **headers: str) -> httpx.Response:
    form = {"csrf": csrf(client.get("/console/login")), "token": token, "next": "/console/tokens"}
    return client.post("/console/login", data=form, headers=headers)


def csrf(answer: httpx.Response) -> str:
    found = CSRF.search(answer.text)
    assert found is not None, answer.text
    return found[1]


def test_one_logs_in_and_out_in_a_browser(shop: Shop, window: Window) -> None:
    page = window.open("tokens")
    assert "/console/login" in page.url
    window.check_accessible()
    page.get_by_label("Token").fill(shop.token)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Tokens", level=1).wait_for()
    assert page.evaluate("document.cookie") == ""  # no script can read it
    page.get_by_role("button", name="Log out").click()
    page.get_by_text("You have logged out.").wait_for()
    assert "/console/login" in window.open("tokens").url


def test_what_no_token_opens_is_named(shop: Shop, window: Window) -> None:
    worker = shop.store.tokens.create("w", "worker")
    window.allow(401, 403)
    page = window.open("login")
    page.get_by_label("Token").fill("pst_wrong")
    page.get_by_role("button", name="Log in").click()
    page.get_by_text("This token is unknown or revoked").wait_for()
    shop.api.client.get("/v1/tokens")

    def is_known() -> bool:
        page.get_by_label("Token").fill(worker)
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("alert").wait_for()
        return "worker's" in page.get_by_role("alert").inner_text()

    await_true(is_known, what="the API, which is notified of new tokens, knows the worker's")
    assert "role viewer or admin" in page.get_by_role("alert").inner_text()
    window.check_looks(dark=True)


def test_the_address_alone_leads_to_the_console(client: httpx.Client) -> None:
    answer = client.get("/")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/overview")


def test_each_answer_has_the_headers(shop: Shop, client: httpx.Client) -> None:
    assert login(client, shop.token).headers["location"] == "/console/tokens"
    for path in ("login", "overview", "tokens", "nothing", "static/console.css", "static/no.js"):
        headers = client.get(f"/console/{path}").headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        if not path.startswith("static"):
            assert headers["cache-control"] == "no-store"


def test_the_cookie_is_for_this_site_alone(shop: Shop, client: httpx.Client) -> None:
    plain = login(client, shop.token).headers["set-cookie"]
    for attribute in ("HttpOnly", "SameSite=strict", "Path=/console"):
        assert attribute in plain
    assert "Secure" not in plain
    client.cookies.clear()
    behind = login(client, shop.token, **{"X-Forwarded-Proto": "https"}).headers["set-cookie"]
    assert "Secure" in behind


def test_a_session_that_another_has_set_is_not_taken_over(shop: Shop, client: httpx.Client) -> None:
    client.cookies.set(COOKIE, "known-to-an-attacker", path="/console")
    login(client, shop.token)
    ours = (
        client.cookies[COOKIE] if len(client.cookies) == 1 else list(client.cookies.jar)[-1].value
    )
    assert ours != "known-to-an-attacker"
    client.cookies.clear()
    client.cookies.set(COOKIE, "known-to-an-attacker", path="/console")
    assert client.get("/console/tokens").status_code == 303


def test_a_login_replaces_the_session_before(shop: Shop, client: httpx.Client) -> None:
    login(client, shop.token)
    first = client.cookies[COOKIE]
    client.post("/console/logout", data={"csrf": csrf(client.get("/console/tokens"))})
    login(client, shop.token)
    assert client.cookies[COOKIE] != first
    client.cookies.clear()
    client.cookies.set(COOKIE, first, path="/console")  # a copy of it ended with the logout
    assert client.get("/console/tokens").status_code == 303


def test_only_a_hash_of_it_is_in_the_store(shop: Shop, client: httpx.Client) -> None:
    login(client, shop.token)
    with shop.store.connection() as connection:
        (row,) = connection.execute("SELECT * FROM penstock.console_sessions").fetchall()
    assert client.cookies[COOKIE].encode() not in row


def test_every_process_of_a_store_knows_the_login(shop: Shop, client: httpx.Client) -> None:
    login(client, shop.token)
    with shop.serve().as_bearer(None) as other:
        other.cookies.set(COOKIE, client.cookies[COOKIE], path="/console")
        assert other.get("/console/tokens").status_code == 200
        token = csrf(client.get("/console/tokens"))
        client.post("/console/logout", data={"csrf": token})
        assert other.get("/console/tokens").status_code == 303


def test_a_revoked_token_ends_its_sessions_at_once(shop: Shop, client: httpx.Client) -> None:
    login(client, shop.token)
    assert client.get("/console/tokens").status_code == 200
    shop.store.tokens.revoke("admin")
    assert client.get("/console/tokens").status_code == 303


def test_an_idle_session_ends(shop: Shop, client: httpx.Client) -> None:
    sessions = Sessions(shop.store, idle=timedelta(minutes=10))
    session = sessions.begin(shop.token)
    assert session is not None
    assert sessions.find(session.id) is not None
    for minutes, alive in ((9, True), (9, True), (11, False)):  # a request begins the time anew
        with shop.store.connection() as connection:
            connection.execute(
                "UPDATE penstock.console_sessions SET seen_at = seen_at - %s",
                [timedelta(minutes=minutes)],
            )
        assert (sessions.find(session.id) is not None) == alive


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "none"},
        {"Origin": "https://evil.example"}, {"Origin": "null"},
    ],
)  # fmt: skip
def test_another_sites_form_changes_nothing(
    shop: Shop, client: httpx.Client, headers: dict[str, str]
) -> None:
    login(client, shop.token)
    form = {"csrf": csrf(client.get("/console/tokens")), "name": "new", "role": "admin"}
    answer = client.post("/console/tokens", data=form, headers=headers)
    assert answer.status_code == 403
    assert "another site" in answer.text
    assert [token.name for token in shop.store.tokens.all()] == ["admin"]


@pytest.mark.parametrize("token", ["", "0" * 64, "é", None])
def test_a_form_without_the_sessions_token_changes_nothing(
    shop: Shop, client: httpx.Client, token: str | None
) -> None:
    login(client, shop.token)
    form = {"name": "new", "role": "admin"} | ({} if token is None else {"csrf": token})
    assert client.post("/console/tokens", data=form).status_code == 403
    body = {"csrf": csrf(client.get("/console/tokens")), **form}
    assert client.post("/console/tokens", json=body).status_code == 403  # no form at all
    assert [token.name for token in shop.store.tokens.all()] == ["admin"]


def test_another_site_logs_nobody_in(shop: Shop, client: httpx.Client) -> None:
    # A browser sends no cookie with it: there is nothing that the form could match.
    for value in ("", "0" * 64):
        answer = client.post("/console/login", data={"csrf": value, "token": shop.token})
        assert answer.status_code == 403
        client.cookies.clear()


@pytest.mark.parametrize(
    "wanted",
    [
        "https://evil.example/",
        "//evil.example",
        "/v1/tokens",
        "/console/\\evil",
        "/console/logout",
        "",
    ],
)
def test_a_login_leads_to_the_console(shop: Shop, client: httpx.Client, wanted: str) -> None:
    form = {"csrf": csrf(client.get("/console/login")), "token": shop.token, "next": wanted}
    assert client.post("/console/login", data=form).headers["location"] == "/console"
