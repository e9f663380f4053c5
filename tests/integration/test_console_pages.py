"""Every page of the console, over a store with one of each thing: its looks, and what it keeps secret.

The pages are those of the app's own list. What each one shows is tested in the file named after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, Final
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import Locator, Page, expect
from tests.api_help import ApiServer, Shop, known, tokens
from tests.browser import AXE, COLOURS, NARROW, WIDE, Window, token_of

from penstock.api.console.pages import PAGES
from penstock.backfill.request import BackfillRequest, Backfills
from penstock.cli.api_tools import ApiTools
from penstock.core.delivery import DeadLetter
from penstock.embedded.handles import Database
from penstock.streams.nats_consumers import NatsConsumers

XSS: Final = '"><img src=x onerror="document.title=1"><script>document.title="owned"</script>'
SECRET: Final = "hush"  # in each secret of the store
NATS: Final = {
    "type": "nats",
    "url": "nats://me:hush@n1.invalid:4222,nats://me:hush@n2.invalid:4222",
}
API: Final = {
    "type": "rest", "base_url": "https://crm.invalid", "paginator": {"type": "single_page"},
    "headers": {"X-Plain": "hush"}, "auth": {"type": "api_key", "api_key": "hush-{key}"},
    "collections": {"things": {"path": "things"}},
}  # fmt: skip
ENTITIES: Final[dict[str, dict[str, Any]]] = {
    "targets/far": {
        "type": "nats", "url": "nats://n.invalid", "user": "me", "password": "hush",
        "bastion": {"host": "bastion.invalid", "user": "penstock"},
    },
    "targets/web": {
        "type": "http", "url": "https://web.invalid/in", "headers": {"Authorization": "Bearer hush"},
        "secrets": ["whsec_hushhushhushhushhushhushhushhush"],
    },
    "sinks/orders": {
        "type": "stream", "source": "shop", "filter": "record.note <> 'hm'",
        "transform": {"sql": "record.id, record.note"},
    },
    "sinks/copy": {**NATS, "source": "shop"},
    "sinks/out": {"type": "nats", "source": "shop", "target": "far"},
    "consumers/workers": {"stream": "orders", "max_deliver": 1, "ack_wait_ms": 3_600_000},
    "consumers/hook": {
        "type": "webhook", "stream": "orders", "url": "https://hook.invalid/in?key=hush",
        "headers": {"X-Key": "hush"}, "secrets": ["whsec_hushhushhushhushhushhushhushhush"],
    },
    "consumers/mirror": {**NATS, "stream": "orders"},
    "consumers/waits": {"type": "nats", "stream": "orders", "url": "nats://n.invalid", "token": "hush"},
    "providers/crm": API,
    "credentials/live": {"provider": "crm", "properties": {"key": "hush"}},
    "syncs/billing": {"provider": "crm", "collections": ["things"], "credential": "live"},
}  # fmt: skip
NAMES: Final = {
    "overview": "hook", "sources": "shop", "sinks": "copy", "streams": "orders", "consumers": "hook",
    "syncs": "billing", "credentials": "live", "targets": "far", "tokens": "mail",
}  # fmt: skip
"""Whose page is visited, where the path of a page has a name in it."""
VARIANTS: Final = {
    "/sources": ["?q=nothing"],
    "/sources/{name}/delete": ["sources/spare/delete"],
    "/sinks/{name}": ["sinks/orders"],
    "/sinks/{name}/edit": ["sinks/orders/edit"],
    "/sinks/form/new": ["?source=shop&to=stream", "?source=shop&to=nats"],
    "/sinks/form/columns": ["?source=shop&tables=public.orders"],
    "/streams/{stream}": ["?filter=nothing+%3E", "?tail=1"],
    "/consumers/{name}": ["consumers/workers", "consumers/mirror", "consumers/waits"],
    "/consumers/{name}/edit": ["consumers/workers/edit", "consumers/mirror/edit"],
    "/consumers/{name}/delete": ["consumers/orders/delete"],
    "/consumers/form/new": [f"?stream=orders&type={each}" for each in ("pull", "webhook", "nats")],
    "/dead-letters/list": ["?sink=copy"],
    "/dead-letters/replay": ["?sink=copy"],
    "/dead-letters/purge": ["?sink=copy"],
    "/targets": ["?new=http"],
    "/targets/{name}": ["targets/web"],
    "/targets/{name}/edit": ["targets/web/edit"],
}
"""What else is visited of a page: with another query, or of another thing."""

DOCUMENT: Final = "targets: {web: {type: http, url: 'https://moved.invalid'}}"
PLAN: Final = "/changes/plan"
"""The only form that a viewer may send: it changes nothing."""


class Full(Shop):
    """A store with one of each thing, and the API over it."""

    def __init__(self, database: Database) -> None:
        super().__init__(database.url, ApiTools(), "orders")
        self.database = database
        database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
        database.execute("CREATE TABLE logs (note text)")
        parts = urlsplit(database.url)
        host = parts.netloc.rpartition("@")[2]
        url = parts._replace(netloc=f"{parts.username}:hush@{host}").geturl()
        self.put("sources/shop", {"type": "postgres", "url": url})
        self.put(
            "sources/spare", {"type": "postgres", "url": "postgresql://me:hush@127.0.0.1:1/db"}
        )
        for path, spec in ENTITIES.items():
            self.put(path, spec)
        self.put("credentials/live", {"provider": "crm", "properties": {"key": "hush-2"}})
        NatsConsumers(self.store).register(self.stream, "mirror", {}, "all")  # as a run does
        self.publish("a", "b", "c")
        path = "/v1/http-consumers/workers"
        got = self.client.get(f"{path}/next", params={"batch_size": 2, "wait_for_ms": 20_000})
        nack = {"ack_tokens": tokens(got)[:1], "reason": f"no such shop {XSS}"}
        self.client.post(f"{path}/nack", json=nack).raise_for_status()
        self.store.letters.add("copy", [DeadLetter("k1", "s", "too_large", XSS, '{"id": "z"}')])
        (self.letter,) = self._letters(consumer="workers")
        backfills = Backfills(self.store)
        (self.backfill,) = backfills.create(
            [BackfillRequest("shop", "orders", "public", "orders", rows_total=10)]
        )
        self.mail = self.store.tokens.create("mail", "worker", ["workers"])
        self.viewer = token_of(self.store, "viewer")
        known(self.api.as_bearer(self.viewer)).close()

    def put(self, path: str, spec: dict[str, Any]) -> None:
        answer = self.client.put(f"/v1/{path}", json=spec)
        assert answer.status_code in (200, 201), f"{path}: {answer.text}"

    def path(self, route: str) -> str:
        """Return a page's path below /console/, of what there is in the store."""
        page = route.split("/")[1]
        ids = {"dead-letters": self.letter, "backfills": self.backfill}
        values = {
            "{id}": ids.get(page), "{position}": self.position, "{credential}": "live",
            "/chart/{name}": "/chart/latency",
        }  # fmt: skip
        for part, value in values.items():
            route = route.replace(part, f"{value}")
        return re.sub(r"\{\w+\}", lambda _: NAMES[page], route)[1:]

    @property
    def position(self) -> str:
        found = self.client.get("/v1/streams/orders/messages").json()["data"][0]["position"]
        return f"{found['lsn']}:{found['idx']}"

    def content(self) -> dict[str, str]:
        """Return what all tables of the store hold, but for the logins and what an idle API notes."""
        tables = self.database.execute(
            "SELECT c.oid::regclass::text FROM pg_class AS c"
            " WHERE relnamespace = 'penstock'::regnamespace AND relkind = 'r'"
            " AND relname NOT IN ('console_sessions', 'receive_permits')"
        )
        return {
            table: self.database.execute(
                f"SELECT coalesce(md5(string_agg(t::text, ' ' ORDER BY t::text)), '') FROM {table} AS t"
            )[0][0]
            for (table,) in tables
        }

    def _letters(self, **of: str) -> list[int]:
        found = self.client.get("/v1/dead-letters", params=of).json()["data"]
        return [each["id"] for each in found]


@pytest.fixture(scope="module")
def full(shared_database: Database) -> Iterator[Full]:
    with Full(shared_database) as full:
        yield full


@pytest.fixture
def console(full: Full) -> ApiServer:
    return full.api


def visits(full: Full) -> Iterator[str]:
    """Yield the paths of all pages that a GET answers."""
    for page in PAGES:
        for method, route, *_ in page.routes:
            if method == "GET":
                path = full.path(route)
                yield path
                for more in VARIANTS.get(route, ()):
                    yield path + more if more.startswith("?") else more


def resize(page: Page, size: tuple[int, int]) -> None:
    page.set_viewport_size({"width": size[0], "height": size[1]})


def look(page: Page, window: Window, path: str, *, narrow_first: bool) -> None:
    """Check a page narrow and light, and wide and dark: widths know no colours, nor schemes widths."""
    for narrow in (narrow_first, not narrow_first):
        page.emulate_media(color_scheme="light" if narrow else "dark")
        resize(page, NARROW if narrow else WIDE)
        if narrow == narrow_first:
            window.open(path)
        window.check_fits()
        if narrow:
            window.check_accessible()
        else:
            window.check_accessible(*COLOURS)
    landmarks = [page.get_by_role("banner"), page.get_by_role("main"),
                 page.get_by_role("heading", level=1)]  # fmt: skip
    assert [each.count() for each in landmarks] == [1, 1, 1]
    links = page.get_by_role("navigation", name="Pages", exact=True).get_by_role("link")
    assert links.count() == len([each for each in PAGES if each.listed])
    assert page.title() not in ("1", "owned")


def test_schemes_differ_in_colours_alone() -> None:
    """So what fits in one, fits in the other."""
    css = (files("penstock.api.console") / "static" / "console.css").read_text(encoding="utf-8")
    before, *schemes = re.split(r"@media \(prefers-color-scheme: \w+\)", css)
    assert len(schemes) == 1
    assert "color-scheme" not in before
    (variables,) = re.findall(r"^ *\{\s*:root \{([^{}]*)\}\s*\}", schemes[0])
    for name, value in re.findall(r"([\w-]+):([^;]*);", variables):
        assert re.fullmatch(r"--[\w-]+", name), name
        assert re.fullmatch(r" *#(?:[0-9a-f]{3}){1,2}", value), name
    assert re.sub(r"[\w-]+:[^;]*;", "", variables).strip() == ""
    assert "color-scheme" not in schemes[0]
    assert "light-dark(" not in css


def test_each_page_fits_is_accessible_and_has_no_secret(full: Full, window: Window) -> None:
    window.login(full.token)
    window.page.add_init_script(path=AXE)  # sent once, as that takes as long as its run
    page, pages, wrong = window.page, 0, []
    for path in visits(full):
        answer = page.request.get(f"http://{window.address}/console/{path}")
        html = answer.text()
        if answer.status != 200:
            wrong.append(f"{path}: {answer.status}")
        for secret in (SECRET, "PRIVATE KEY", full.token, full.viewer, full.mail):
            if secret in html:
                wrong.append(f"{path} has {secret}: {html.split(secret)[0][-200:]}")
        if "<html" in html:  # no figures of a chart, columns, nor the export
            pages += 1
            try:
                look(page, window, path, narrow_first=pages % 2 == 1)  # as the one before has ended
            except AssertionError as error:
                wrong.append(f"{path}: {error}")
    assert not wrong, "\n".join(wrong)
    assert pages > len(PAGES)
    window.allow(404)
    page.emulate_media(color_scheme="light")
    window.open("nothing").get_by_role("heading", name="Not found", level=1).wait_for()
    for size in (NARROW, WIDE):
        resize(page, size)
        window.check_fits()
    window.check_accessible()


def test_a_viewer_changes_nothing_by_any_form(full: Full, window: Window) -> None:
    window.login(full.viewer)
    csrf = window.open("tokens").locator("meta[name=csrf]").get_attribute("content") or ""
    before, posts = full.content(), 0
    for page in PAGES:
        for method, route, *_ in page.routes:
            if method != "POST" or route == PLAN:
                continue
            path, posts = full.path(route), posts + 1
            answer = window.context.request.post(
                f"http://{window.address}/console/{path}?sink=copy",
                form={"csrf": csrf, "name": "new", "role": "admin", "confirm": path.split("/")[-2:][0],
                      "sink": "orders", "to": "new", "do": "save", "source": "shop", "type": "pull",
                      "stream": "orders", "tables": "public.logs", "document": DOCUMENT},
                headers={"Sec-Fetch-Site": "same-origin"},
            )  # fmt: skip
            assert (answer.status, "Nothing was changed." in answer.text()) == (403, True), path
    assert posts > 2 * len(PAGES)
    assert full.content() == before
    plan = window.context.request.post(
        f"http://{window.address}/console{PLAN}", form={"csrf": csrf, "document": DOCUMENT},
        headers={"Sec-Fetch-Site": "same-origin"},
    )  # fmt: skip
    assert (plan.status, "moved.invalid" in plan.text()) == (200, True), plan.text()
    assert full.content() == before


def tab_to(page: Page, found: Locator) -> None:
    """Press Tab until an element has the focus."""
    for _ in range(60):
        if found.count() and found.evaluate("each => each === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not lead to {found}")


def test_it_is_used_by_the_keyboard_alone(full: Full, window: Window) -> None:
    window.login(full.token)
    page = window.open("tokens")
    keyboard = page.keyboard
    keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    tab_to(page, page.get_by_label("Name", exact=True))
    keyboard.type("by-keys")
    keyboard.press("Tab")
    keyboard.type("viewer")
    tab_to(page, page.get_by_role("button", name="Make the token"))
    keyboard.press("Enter")
    page.get_by_role("heading", name="The token by-keys").wait_for()
    assert "viewer" in page.get_by_role("row", name="by-keys").inner_text()
    tab_to(page, page.get_by_role("link", name="Revoke by-keys"))
    keyboard.press("Enter")
    page.get_by_role("heading", name="Revoke by-keys").wait_for()
    tab_to(page, page.get_by_label("To go on, type the name by-keys"))
    keyboard.type("by-keys")
    keyboard.press("Enter")
    page.get_by_text("The token is revoked").wait_for()
    # A row of a list, whose link keeps the focus while the list is read again.
    tab_to(page, page.get_by_role("link", name="Consumers", exact=True))
    keyboard.press("Enter")
    page.get_by_role("heading", name="Consumers", level=1).wait_for()
    link = page.get_by_role("link", name="workers", exact=True)
    tab_to(page, link)
    lag = page.get_by_role("row", name="workers").get_by_role("cell").nth(3)
    before = int(lag.inner_text())
    full.publish("d", "e")
    expect(lag).to_have_text(f"{before + 2}", timeout=30_000)
    expect(link).to_be_focused()
    keyboard.press("Enter")
    page.get_by_role("heading", name="workers", level=1).wait_for()


def test_names_of_tokens_are_text(full: Full, window: Window) -> None:
    hostile = full.store.tokens.create(XSS, "viewer")
    full.store.tokens.create(f"{XSS} too", "worker", [XSS])
    known(full.api.as_bearer(hostile)).close()
    # The login's form has the place that it leads to.
    window.open("login?next=/console/%22%3E" + quote(XSS))
    page = window.page
    window.allow(404)
    page.get_by_label("Token").fill(hostile)
    page.get_by_role("button", name="Log in").click()
    page.get_by_text("There is no page /console/").wait_for()
    for path in ("tokens", f"tokens?q={quote(XSS)}", f"consumers?q={quote(XSS)}"):
        window.open(path)
        page.get_by_text("onerror=").first.wait_for()
        assert page.locator(".who-name b").inner_text() == XSS
        assert page.locator("main img").count() == 0
        assert page.title() not in ("1", "owned")
    row = window.open("tokens").get_by_role("row").filter(has_text="too")
    assert row.get_by_role("rowheader").inner_text() == f"{XSS} too"
    resize(page, NARROW)
    window.check_fits()
    for shown in (page.locator(".who-name span"), page.get_by_role("button", name="Log out")):
        box = shown.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= NARROW[0]


def test_what_breaks_the_policy_fails_a_test(full: Full, window: Window) -> None:
    page = window.open("login")
    with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
        page.evaluate(
            "() => { const script = document.createElement('script');"
            " script.textContent = 'window.owned = 1'; document.body.append(script); }"
        )
    assert page.evaluate("() => window.owned") is None
    with pytest.raises(AssertionError, match="Content Security Policy"):
        window.check_clean()
    window.errors.clear()
