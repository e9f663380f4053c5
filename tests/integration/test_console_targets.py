"""The console's page of targets in a real browser: real NATS servers, a real SSH server between."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import asyncssh
import pytest
from playwright.sync_api import Page
from tests.api_help import Shop, known
from tests.bastions import SshServer, public
from tests.browser import NARROW, Window

from penstock.bastion.keys import fingerprint
from penstock.embedded.handles import Database
from penstock.embedded.nats import EmbeddedNats

XSS = '"><img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'


@pytest.fixture
def ssh() -> Iterator[SshServer]:
    with SshServer() as server:
        yield server


def put(shop: Shop, path: str, **spec: Any) -> None:
    answer = shop.client.put(f"/v1/{path}", json=spec)
    assert answer.status_code in (200, 201), answer.text


def spec_of(database: Database, name: str) -> dict[str, Any]:
    rows = database.execute("SELECT spec FROM penstock.entities WHERE name = %s", [name])
    return dict(rows[0][0])


def press(page: Page, button: str) -> None:
    page.get_by_role("button", name=button).click()


def test_a_cluster_is_added_tested_used_and_deleted(
    shop: Shop, window: Window, nats_server: EmbeddedNats
) -> None:
    window.login(shop.token)
    page = window.open("targets")
    page.get_by_text("There are no targets").wait_for()
    page.get_by_label("Name", exact=True).fill("cluster")
    page.get_by_label("Servers").fill(nats_server.url)
    press(page, "Add the target")
    page.get_by_text("The target is added.").wait_for()
    press(page, "Test the connection")
    page.get_by_text("has taken the login and has JetStream").wait_for()
    page.get_by_text("Nothing uses it yet").wait_for()
    put(shop, "sources/shop", type="postgres", url="postgresql://nobody@127.0.0.1:1/none")
    put(shop, "sinks/orders", type="nats", source="shop", target="cluster")
    page = window.open("targets")
    assert "cluster nats" in " ".join(page.get_by_role("row", name="cluster").inner_text().split())
    assert page.get_by_role("row", name="cluster").get_by_role("cell").last.inner_text() == "1"
    page.get_by_role("link", name="cluster", exact=True).click()
    assert page.get_by_role("row", name="orders").inner_text().split() == ["orders", "sink", "nats"]
    page.get_by_role("link", name="Delete").click()
    page.get_by_text("while something uses it").wait_for()
    assert page.get_by_role("listitem").filter(has_text="sink orders").count() == 1
    assert shop.client.delete("/v1/sinks/orders").status_code == 200
    page.reload()
    page.get_by_text(f"Its address, {nats_server.url}").wait_for()
    window.check_accessible()
    window.allow(422)
    page.get_by_label("To go on, type the name").fill("clustr")
    press(page, "Delete cluster")
    page.get_by_text("This is not cluster.").wait_for()
    page.get_by_label("To go on, type the name").fill("cluster")
    press(page, "Delete cluster")
    page.get_by_text("The target is deleted.").wait_for()
    assert shop.client.get("/v1/targets/cluster").status_code == 404


def test_a_dead_cluster_is_named_with_its_remedy(shop: Shop, window: Window) -> None:
    put(shop, "targets/dead", type="nats", url="nats://127.0.0.1:1")
    window.login(shop.token)
    page = window.open("targets/dead")
    press(page, "Test the connection")
    failed = page.locator(".trouble.failed")
    assert "127.0.0.1:1" in failed.inner_text()
    window.check_accessible()


def test_secrets_stay_out_of_pages_and_where_they_are(
    shop: Shop, window: Window, database: Database
) -> None:
    window.login(shop.token)
    page = window.open("targets")
    page.get_by_role("link", name="An HTTP endpoint").click()
    window.allow(422)
    page.get_by_label("Name", exact=True).fill("crm")
    page.get_by_label("URL").fill("https://me:hush1@crm.example/base?x=hush5")
    page.get_by_label("Headers").fill("Authorization: Bearer hush2\nX-Plain: hush3")
    page.get_by_label("Signing secrets").fill("whsec_hush4")
    press(page, "Add the target")
    page.locator("#url-error").wait_for()
    assert "hush" not in page.content()
    assert page.get_by_label("Name", exact=True).input_value() == "crm"
    page.get_by_label("URL").fill("https://crm.example/base")
    page.get_by_label("Headers").fill("Authorization: Bearer hush2\nX-Plain: hush3")
    page.get_by_label("Signing secrets").fill("")
    press(page, "Add the target")
    page.get_by_text("The target is added.").wait_for()
    page.get_by_role("link", name="Edit").click()
    masks = page.get_by_label("Headers").input_value()
    assert sorted(masks.splitlines()) == ["Authorization: ***", "X-Plain: ***"]
    page.get_by_label("URL").fill("https://crm.example/other")
    page.get_by_label("Headers").fill("Authorization: ***\nX-New: n")
    press(page, "Save")
    page.get_by_text("The target is changed").wait_for()
    assert "hush" not in page.content()
    assert spec_of(database, "crm") == {
        "type": "http", "url": "https://crm.example/other",
        "headers": {"Authorization": "Bearer hush2", "X-New": "n"},
    }  # fmt: skip


def test_a_login_stays_where_its_mask_stays(shop: Shop, window: Window, database: Database) -> None:
    put(shop, "targets/cluster", type="nats", url="nats://n:4222", user="app", password="hush")
    window.login(shop.token)
    window.allow(422)
    page = window.open("targets/cluster/edit")
    assert page.get_by_label("Password").input_value() == "***"
    page.get_by_label("Password").fill("hush2")
    page.get_by_label("Servers").fill("ftp://n")
    press(page, "Save")
    page.locator("#url-error").wait_for()
    assert "hush" not in page.content()
    assert page.get_by_label("Password").input_value() == "***"
    page.get_by_label("Servers").fill("nats://moved:4222")
    press(page, "Save")
    page.get_by_text("The target is changed").wait_for()
    spec = spec_of(database, "cluster")
    assert (spec["url"], spec["password"]) == ("nats://moved:4222", "hush")


def test_a_form_that_is_older_than_the_target_is_refused(
    shop: Shop, window: Window, database: Database
) -> None:
    put(shop, "targets/crm", type="http", url="https://crm.example")
    window.login(shop.token)
    window.allow(412, 422)
    page = window.open("targets/crm/edit")
    put(shop, "targets/crm", type="http", url="https://moved.example")
    page.get_by_label("URL").fill("https://mine.example")
    press(page, "Save")
    page.get_by_text("It was changed since this form was shown.").wait_for()
    assert spec_of(database, "crm")["url"] == "https://moved.example"
    page = window.open("targets")
    for name, text in (
        ("crm", "There is one with the name 'crm' already."),
        ("a/b", "is not a name"),
    ):
        page.get_by_label("Name", exact=True).fill(name)
        page.get_by_label("Servers").fill("nats://n:4222")
        press(page, "Add the target")
        page.get_by_text(text).wait_for()
    assert spec_of(database, "crm")["url"] == "https://moved.example"


def test_the_way_through_a_bastion(
    shop: Shop, window: Window, ssh: SshServer, nats_server: EmbeddedNats
) -> None:
    ssh.names["nats.internal", 4222] = ("127.0.0.1", nats_server.port or 0)
    window.login(shop.token)
    page = window.open("targets")
    page.get_by_label("Name", exact=True).fill("far")
    page.get_by_label("Servers").fill("nats://nats.internal:4222")
    page.get_by_label("Bastion's host", exact=False).first.fill("127.0.0.1")
    page.get_by_label("Bastion's user").fill("penstock")
    page.get_by_label("Bastion's port").fill(str(ssh.port))
    press(page, "Add the target")
    page.get_by_text("not trusted yet").wait_for()
    # The line is installed as it stands there, and the host key compared by its fingerprint.
    line = page.locator(".guide .copy code").first.inner_text()
    ssh.kill()
    ssh.user_key = asyncssh.import_public_key(line)
    ssh.start()
    press(page, "Ask the bastion for its key")
    shown = page.locator(".guide [role=status] code").first.inner_text()
    assert shown == fingerprint(public(ssh.host_key))
    window.check_accessible()
    press(page, "It is the same: trust it")
    page.get_by_text("The host key is trusted.").wait_for()
    press(page, "Test the connection")
    page.get_by_text(f"through penstock@127.0.0.1:{ssh.port}").wait_for()
    assert ssh.asked == [("nats.internal", 4222)]
    assert "PRIVATE KEY" not in page.content()
    # Another machine stands in the bastion's place: trusted only in so many words.
    ssh.kill()
    ssh.host_key = asyncssh.generate_private_key("ssh-ed25519")
    ssh.start()
    press(page, "Ask the bastion for its key")
    page.get_by_text("It is another key than the trusted one").wait_for()
    press(page, "Trust the new key instead")
    page.get_by_text("The host key is trusted.").wait_for()
    assert fingerprint(public(ssh.host_key)) in page.locator(".guide").inner_text()
    ssh.kill()
    window.allow(424)
    press(page, "Ask the bastion for its key")
    page.get_by_text(re.compile("cannot be reached")).wait_for()


def test_a_viewer_sees_text_and_no_forms(shop: Shop, window: Window) -> None:
    bastion = {"host": "b.example", "user": XSS}
    put(shop, "targets/far", type="nats", url="nats://n:4222", bastion=bastion)
    put(shop, "targets/web", type="http", url="https://w.example")
    viewer = shop.store.tokens.create("viewer", "viewer")
    known(shop.api.as_bearer(viewer)).close()
    window.login(viewer)
    window.page.set_viewport_size({"width": NARROW[0], "height": NARROW[1]})
    for path in ("targets", "targets/far", "targets/far/edit", "targets/far/delete", "targets/web"):
        page = window.open(path)
        assert page.locator("main form[method=post]").count() == 0, path
        assert page.locator("main img").count() == 0, path
        assert "owned" not in page.title()
        window.check_fits()
    window.open("targets").get_by_text("onerror=").first.wait_for()
