"""`penstock check` of what a NATS user may publish: by the server's own word, and without a message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config.nats import NatsSinkConfig
from penstock.core.finding import Finding
from penstock.embedded.handles import JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.sinks.nats import check as nats_check
from penstock.sinks.nats.client import connect_first
from penstock.sinks.nats.permissions import refused

# Of each login there is one who may ask for permissions, and one, in small letters, who may not.
USERS = {
    "all": "",
    "some": '["$JS.API.>", "shop.public.orders.*", "{info}"]',
    "other": '["$JS.API.>", "other.>", "{info}"]',
    "but": '{{ allow: [">"], deny: ["shop.*.orders.delete", "{no_info}"] }}',
    "bare": '["shop.>", "{info}"]',
    "unread": '["$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.INFO.*", "shop.>", "{info}"]',
}


@pytest.fixture(scope="module")
def server(server_dir: Path) -> Iterator[EmbeddedNats]:
    users = ['{ user: admin, password: "x" }']
    for name, publish in USERS.items():
        for user, info, no_info in (
            (name.upper(), "$SYS.REQ.USER.INFO", "none"), (name, "none", "$SYS.REQ.USER.INFO")
        ):  # fmt: skip
            allowed = publish.format(info=info, no_info=no_info)
            rest = f"permissions: {{ publish: {allowed} }}" if allowed else ""
            users.append(f'{{ user: {user}, password: "x", {rest} }}')
    config = "authorization { users: [\n" + "\n".join(users) + "\n] }"
    with EmbeddedNats(server_dir / "permissions", config) as server:
        yield server


@pytest.fixture(scope="module")
def streams(server: EmbeddedNats) -> Iterator[JetStream]:
    with JetStream(server.url, user="admin", password="x") as handle:
        handle.add_stream("SHOP", ["shop.>"])
        yield handle


def of_user(server: EmbeddedNats, user: str, subject: str, *samples: str) -> list[Finding]:
    """Return what is found of publishing."""
    config = NatsSinkConfig(url=server.url, user=user, password="x", subject=subject)
    found = nats_check.inspect(config, samples, source="shop")
    return [f for f in found if "publish to" in f.message and f.subject.startswith("subject ")]


ORDERS = [f"shop.public.orders.{action}" for action in ("insert", "update", "delete")]


@pytest.mark.parametrize("user", [*USERS, *map(str.upper, USERS)])
def test_subjects_that_are_known(server: EmbeddedNats, streams: JetStream, user: str) -> None:
    (found,) = of_user(server, user, "{source}.{schema}.{table}.{action}", *ORDERS)
    if user.lower() in ("all", "some", "bare", "unread"):
        assert (found.level, found.message) == ("ok", "this user may publish to it")
    else:
        denied = ORDERS if user.lower() == "other" else ORDERS[-1:]
        assert found.level == "error"
        assert found.message == f"this user may not publish to {', '.join(denied)}"
        assert 'allow: ["shop.*.*.*"]' in found.fix
    (found,) = of_user(server, user, "{source}.{schema}.{table}.{action}", *ORDERS, "shop.x")
    if user.lower() == "some":
        assert found.message == "this user may not publish to shop.x"
    # Nobody has got a message of it.
    assert streams.info("SHOP").state.last_seq == 0


@pytest.mark.parametrize("user", ["all", "some", "unread", "ALL", "SOME", "UNREAD"])
def test_whose_the_messages_of_a_stream_are(
    server: EmbeddedNats, streams: JetStream, user: str
) -> None:
    """Who may not ask for them takes another publisher's for its own."""
    config = NatsSinkConfig(url=server.url, user=user, password="x")
    found = nats_check.inspect(config, ORDERS, source="shop")
    reported = [f for f in found if "$JS.API.STREAM.MSG.GET.SHOP" in f.message]
    assert [f.level for f in reported] == ["warning"] * (user.lower() == "unread")
    assert all('allow: ["$JS.API.STREAM.MSG.GET.SHOP"]' in f.fix for f in reported)


@pytest.mark.parametrize(
    ("user", "level"),
    [("ALL", "ok"), ("BARE", "ok"), ("SOME", "error"), ("BUT", "warning"), ("OTHER", "error"),
     ("all", "ok"), ("bare", "ok"), ("other", "warning")],
)  # fmt: skip
def test_subjects_that_are_not_known_yet(
    server: EmbeddedNats, streams: JetStream, user: str, level: str
) -> None:
    subject = "shop.{schema}.orders.{record.kind}" if user == "BUT" else "shop.{record.kind}"
    (found,) = of_user(server, user, subject)
    assert found.level == level, found
    assert streams.info("SHOP").state.last_seq == 0


def test_no_other_subscriber_gets_what_is_tried(server: EmbeddedNats, streams: JetStream) -> None:
    """Not even one that takes everything, of a user who may publish everything."""
    admin = NatsSinkConfig(url=server.url, user="admin", password="x")
    listener = connect_first(admin, "listener", inbox=b"shop.")  # takes `shop.*`
    publisher = connect_first(admin, "publisher")
    try:
        assert refused(publisher, ["shop.1", "shop.2"]) == []
        publisher.send(b"PUB shop.3 0\r\n\r\nPING\r\n")
        publisher.step(5)
        events = listener.step(5)[1]
    finally:
        publisher.close()
        listener.close()
    assert [event.number for event in events] == [3]  # type: ignore[union-attr]  # it is there
