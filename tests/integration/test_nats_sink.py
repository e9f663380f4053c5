"""The NATS sink against a real nats-server: order, replays, faults, refusals."""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.waits import await_true

from penstock.config.nats import NatsSinkConfig
from penstock.core.errors import SinkError
from penstock.core.message import SUBJECT_FIELD
from penstock.core.tls import verifying_context
from penstock.embedded.handles import JetStream, Msg
from penstock.embedded.nats import EmbeddedNats
from penstock.sinks.nats.check import inspect
from penstock.sinks.nats.jetstream import find_stream
from penstock.sinks.nats.sink import NatsSink

from .nats_servers import (
    Writer,
    batch,
    make_certificates,
    make_operator,
    make_seed,
)

SUBJECTS = "shop.public.>"


@pytest.fixture
def own_server(server_dir: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddedNats]:
    """A server that the test may stop."""
    name = request.node.name.replace("/", "_").replace("[", "_").replace("]", "")
    with EmbeddedNats(server_dir / name) as server:
        yield server


@pytest.fixture
def stream() -> str:
    # A name of its own for each test: once, on a busy machine, a stream held the messages of a
    # deleted one of the same name.
    return f"S{uuid.uuid4().hex[:8]}"


def numbers_by_key(messages: Sequence[Msg], column: str = "id") -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = defaultdict(list)
    for message in messages:
        record = json.loads(message.data)["record"]
        found[record[column]].append(record["n"])
    return found


def assert_in_order(messages: Sequence[Msg], count: int) -> None:
    for key, numbers in numbers_by_key(messages).items():
        assert numbers == sorted(set(numbers)), f"key {key}"
    assert len(messages) == count


def test_50k_rows_arrive_once_with_their_ids(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    nats.add_stream(stream, SUBJECTS)
    sink = NatsSink(NatsSinkConfig(url=nats_server.url), name="orders", source="shop")
    rows = batch(range(50_000))

    written = sink.write(rows)
    assert (written.delivered, written.duplicates, written.dead) == (50_000, 0, [])

    messages = nats.messages(stream)
    assert [json.loads(m.data)["record"]["n"] for m in messages] == list(range(1, 50_001))
    assert [m.headers["Nats-Msg-Id"] for m in messages] == rows["idempotency_key"].to_pylist()
    assert written.bytes == sum(len(m.data) for m in messages)
    assert json.loads(messages[0].data) == {
        "record": {"id": 0, "n": 1},
        "changes": None,
        "action": "insert",
        "metadata": {
            "table_schema": "public",
            "database": "shop",
            "idempotency_key": "0123456789abcdef-1-0",
            "consumer": {"id": "orders", "name": "orders"},
        },
    }
    assert messages[0].subject == "shop.public.orders.insert"

    again = sink.write(rows)
    assert (again.delivered, again.duplicates) == (50_000, 50_000)
    assert nats.info(stream).state.messages == 50_000
    sink.close()


def test_a_hot_group_stays_in_order(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    nats.add_stream(stream, SUBJECTS)
    keys = [0 if n % 2 else n for n in range(3000)]
    Writer(NatsSinkConfig(url=nats_server.url)).write(batch(keys))
    assert_in_order(nats.messages(stream), 3000)


def test_a_moved_key_comes_after_what_it_left_behind(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    # Each row leaves the group of the row before it: one chain, though no two groups are equal.
    nats.add_stream(stream, SUBJECTS)
    count = 500
    old = [None, *range(count - 1)]
    Writer(NatsSinkConfig(url=nats_server.url)).write(
        batch(range(count), groups=range(count), old_groups=old)
    )
    numbers = [json.loads(m.data)["record"]["n"] for m in nats.messages(stream)]
    assert numbers == list(range(1, count + 1))


def test_rows_come_without_deletes_truncates_and_old_values(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    """The newest version of a row has the key that an update gave it; the old one is not in it."""
    nats.add_stream(stream, "shop.public.orders")
    changes = [
        ("insert", 1),
        ("update", 1),
        ("delete", 1),
        ("truncate", 0),
        ("update", 2),
        ("read", 3),
    ]
    rows = batch(
        [key for _, key in changes],
        actions=[action for action, _ in changes],
        changes=[{"id": 1} if action == "update" else None for action, _ in changes],
        groups=[7] * len(changes),
    )
    config = NatsSinkConfig(url=nats_server.url, kind="rows")
    written = Writer(config).write(rows)
    assert (written.delivered, written.dead) == (4, [])
    messages = nats.messages(stream)
    bodies = [json.loads(message.data) for message in messages]
    assert [list(body) for body in bodies] == [["record", "metadata"]] * 4
    assert [body["record"]["id"] for body in bodies] == [1, 1, 2, 3]
    assert [body["record"]["n"] for body in bodies] == [1, 2, 5, 6]
    assert {m.subject for m in messages} == {"shop.public.orders"}
    assert written.bytes == sum(len(message.data) for message in messages)
    assert Writer(config).write(rows.slice(2, 2)).delivered == 0


def test_each_message_goes_to_its_own_subject(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    """Those of a group in their order, though one cannot be sent at all."""
    nats.add_stream(stream, [SUBJECTS, "eu.>"])
    subjects = ["eu.1", None, "eu.*", "eu.2", "$JS.API.INFO", "eu.1"]
    rows = batch(range(6), groups=[1] * 6).append_column(SUBJECT_FIELD, pa.array(subjects))
    written = Writer(NatsSinkConfig(url=nats_server.url)).write(rows)
    assert [m.subject for m in nats.messages(stream)] == [
        "eu.1", "shop.public.orders.insert", "eu.2", "eu.1",
    ]  # fmt: skip
    assert [(d.code, d.idempotency_key) for d in written.dead] == [
        ("bad_subject", "0123456789abcdef-3-0"),
        ("bad_subject", "0123456789abcdef-5-0"),
    ]
    assert json.loads(written.dead[0].body)["record"] == {"id": 2, "n": 3}


def test_group_by_of_the_sink_orders_by_the_record(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    nats.add_stream(stream, SUBJECTS)
    count = 300
    records = [{"id": n, "customer_id": n // 100, "n": n} for n in range(count)]
    # Row 100 moved from customer 0 to 1, so it comes after all of customer 0's.
    changes = [{"customer_id": 0} if n == 100 else None for n in range(count)]
    config = NatsSinkConfig(url=nats_server.url, group_by=["customer_id"])
    Writer(config).write(batch(range(count), records=records, changes=changes))
    messages = nats.messages(stream)
    for numbers in numbers_by_key(messages, "customer_id").values():
        assert numbers == sorted(numbers)
    order = [json.loads(m.data)["record"]["n"] for m in messages]
    assert order.index(99) < order.index(100) < order.index(101)


def test_a_killed_server_loses_nothing(own_server: EmbeddedNats, stream: str) -> None:
    keys = [n % 5000 for n in range(60_000)]
    with JetStream(own_server.url) as nats:
        nats.add_stream(stream, SUBJECTS)
        writer = Writer(NatsSinkConfig(url=own_server.url))
        writer.start(batch(keys))
        await_true(lambda: nats.info(stream).state.messages > 2000)
        own_server.kill()
        own_server.start()
        written = writer.result(60)
        assert written.delivered == 60_000
        assert_in_order(nats.messages(stream), 60_000)


def test_a_stream_that_is_made_later(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    writer = Writer(NatsSinkConfig(url=nats_server.url))
    writer.start(batch([n % 10 for n in range(100)]))
    writer.until_retry("no_stream")
    command = 'nats stream add SHOP --subjects "shop.*.*.*" --storage file --dupe-window 2m'
    assert command in writer.errors[0].remedy
    nats.add_stream(stream, SUBJECTS)
    assert writer.result().delivered == 100
    assert_in_order(nats.messages(stream), 100)


def test_should_stop_ends_the_backoff(nats_server: EmbeddedNats) -> None:
    stop: list[bool] = []
    writer = Writer(NatsSinkConfig(url=nats_server.url), should_stop=lambda: bool(stop))
    writer.start(batch([1]))
    writer.until_retry("no_stream")
    stop.append(True)
    with pytest.raises(SinkError) as caught:
        writer.result()
    assert (caught.value.code, caught.value.transient) == ("no_stream", True)


def test_too_large_for_the_server(nats_server: EmbeddedNats, nats: JetStream, stream: str) -> None:
    nats.add_stream(stream, SUBJECTS)
    records = [{"id": 1, "n": n, "text": "x" * (2_000_000 if n == 1 else 10)} for n in range(3)]
    written = Writer(NatsSinkConfig(url=nats_server.url)).write(batch([1, 1, 1], records=records))
    assert written.delivered == 2
    (dead,) = written.dead
    assert dead.code == "message_too_large"
    assert "max_payload" in dead.reason
    assert dead.idempotency_key == "0123456789abcdef-2-0"
    assert dead.subject == "shop.public.orders.insert"
    assert json.loads(dead.body)["record"] == records[1]
    assert [json.loads(m.data)["record"]["n"] for m in nats.messages(stream)] == [0, 2]


def test_too_large_for_the_stream(nats_server: EmbeddedNats, nats: JetStream, stream: str) -> None:
    nats.add_stream(stream, SUBJECTS, max_msg_size=1000)
    records = [{"id": 1, "n": n, "text": "x" * (2000 if n == 1 else 10)} for n in range(3)]
    written = Writer(NatsSinkConfig(url=nats_server.url)).write(batch([1, 1, 1], records=records))
    assert (written.delivered, [d.code for d in written.dead]) == (2, ["message_too_large"])
    assert [json.loads(m.data)["record"]["n"] for m in nats.messages(stream)] == [0, 2]


def test_a_subject_longer_than_a_control_line(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    nats.add_stream(stream, "long.>")
    records = [{"id": "y" * 5000, "n": 0}, {"id": "y", "n": 1}]
    config = NatsSinkConfig(url=nats_server.url, subject="long.{record.id}")
    written = Writer(config).write(batch([1, 2], records=records))
    assert (written.delivered, [d.code for d in written.dead]) == (1, ["subject_too_long"])


def test_a_full_stream_keeps_order_when_it_has_room_again(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    # Big messages are refused where small ones still fit: the trap for order within a group.
    nats.add_stream(stream, SUBJECTS, max_bytes=60_000, discard="new")
    pads = [8000 if n % 10 == 0 else 1 for n in range(200)]
    records = [{"id": n % 3, "n": n, "pad": "x" * pads[n]} for n in range(200)]
    writer = Writer(NatsSinkConfig(url=nats_server.url))
    writer.start(batch([n % 3 for n in range(200)], records=records))
    writer.until_retry("stream_full")
    seen: list[Msg] = []
    read = 0

    def drain() -> bool:
        nonlocal read
        messages = [m for m in nats.messages(stream) if m.seq > read]
        seen.extend(messages)
        if messages:
            read = messages[-1].seq
            nats._call(_purge(nats, stream, read))
        return len(seen) == 200

    await_true(drain, 40)
    assert writer.result().delivered == 200
    assert_in_order(seen, 200)


async def _purge(nats: JetStream, stream: str, seq: int) -> None:
    await (await nats._context()).purge_stream(stream, seq=seq + 1)


def test_the_wrong_stream(nats_server: EmbeddedNats, nats: JetStream, stream: str) -> None:
    nats.add_stream(stream, SUBJECTS)
    stop: list[bool] = []
    config = NatsSinkConfig(url=nats_server.url, stream="OTHER")
    writer = Writer(config, should_stop=lambda: bool(stop))
    writer.start(batch([1]))
    writer.until_retry("wrong_stream")
    stop.append(True)
    with pytest.raises(SinkError, match="OTHER"):
        writer.result()
    assert nats.info(stream).state.messages == 0


def test_no_server_acks(nats_server: EmbeddedNats, nats: JetStream, stream: str) -> None:
    # A stream without acks: nothing comes back, not even "no responders".
    nats.add_stream(stream, SUBJECTS, no_ack=True)
    stop: list[bool] = []
    config = NatsSinkConfig(url=nats_server.url, ack_timeout=0.3)
    writer = Writer(config, should_stop=lambda: bool(stop))
    writer.start(batch([1]))
    writer.until_retry("timeout")
    stop.append(True)
    with pytest.raises(SinkError) as caught:
        writer.result()
    assert caught.value.code == "timeout"


def test_nothing_listens(own_server: EmbeddedNats, stream: str) -> None:
    writer = Writer(NatsSinkConfig(url=own_server.url))
    own_server.stop()
    writer.start(batch([1]))
    writer.until_retry("connection_refused")
    assert str(own_server.port) in writer.errors[0].message
    own_server.start()
    with JetStream(own_server.url) as nats:
        nats.add_stream(stream, SUBJECTS)
        assert writer.result().delivered == 1


USERS = """
authorization { users: [
  { user: admin, password: admin }
  { user: penstock, password: "s3cret", permissions: {
      publish: { deny: ["shop.public.secrets.>"] } } }
] }
"""


def test_permission_denied_holds_back_only_its_subject(server_dir: Path, stream: str) -> None:
    with (
        EmbeddedNats(server_dir / "denied", USERS) as server,
        JetStream(server.url, user="admin", password="admin") as nats,
    ):
        nats.add_stream(stream, SUBJECTS)
        tables = ["secrets" if n % 10 == 0 else "orders" for n in range(1000)]
        stop: list[bool] = []
        config = NatsSinkConfig(url=server.url, user="penstock", password="s3cret")
        writer = Writer(config, should_stop=lambda: bool(stop))
        writer.start(batch(range(1000), table=tables))
        writer.until_retry("permission_denied")
        await_true(lambda: nats.info(stream).state.messages == 900)
        assert "shop.public.secrets.insert" in writer.errors[-1].message
        stop.append(True)
        with pytest.raises(SinkError) as caught:
            writer.result()
        assert caught.value.code == "permission_denied"


def test_permission_granted_later(server_dir: Path, stream: str) -> None:
    with (
        EmbeddedNats(server_dir / "granted", USERS) as server,
        JetStream(server.url, user="admin", password="admin") as nats,
    ):
        nats.add_stream(stream, SUBJECTS)
        config = NatsSinkConfig(url=server.url, user="penstock", password="s3cret")
        writer = Writer(config)
        writer.start(batch([n % 3 for n in range(20)], table="secrets"))
        writer.until_retry("permission_denied")
        server.config = USERS.replace("secrets", "nothing")
        server.restart()
        assert writer.result().delivered == 20
        assert_in_order(nats.messages(stream), 20)


@pytest.mark.parametrize(
    "login", [{"user": "penstock", "password": "wr0ng"}, {"token": "wr0ng"}, {}]
)
def test_wrong_login(server_dir: Path, login: dict[str, Any]) -> None:
    with EmbeddedNats(server_dir / f"wrong{len(login)}{'token' in login}", USERS) as server:
        writer = Writer(NatsSinkConfig(url=server.url, **login))
        with pytest.raises(SinkError) as caught:
            writer.write(batch([1]))
        assert (caught.value.code, caught.value.transient) == ("authorization_violation", False)
        assert "wr0ng" not in str(caught.value)


def test_login_in_the_url(server_dir: Path, stream: str) -> None:
    with EmbeddedNats(server_dir / "inurl", USERS) as server:
        url = server.url.replace("://", "://admin:admin@")
        with JetStream(server.url, user="admin", password="admin") as nats:
            nats.add_stream(stream, SUBJECTS)
            assert Writer(NatsSinkConfig(url=url)).write(batch([1])).delivered == 1


def test_token(server_dir: Path, stream: str) -> None:
    with (
        EmbeddedNats(server_dir / "token", 'authorization { token: "t0ken" }') as server,
        JetStream(server.url, token="t0ken") as nats,
    ):
        nats.add_stream(stream, SUBJECTS)
        config = NatsSinkConfig(url=server.url, token="t0ken")
        assert Writer(config).write(batch([1])).delivered == 1
        config = NatsSinkConfig(url=server.url.replace("://", "://t0ken@"))
        assert Writer(config).write(batch([2], first=2)).delivered == 1


@pytest.mark.parametrize("in_file", [False, True])
def test_nkey(server_dir: Path, tmp_path: Path, in_file: bool, stream: str) -> None:
    seed, public = make_seed()
    path = tmp_path / "user.nk"
    path.write_text(f"{seed}\n{public}\n")
    users = f"authorization {{ users: [ {{ nkey: {public} }} ] }}"
    with (
        EmbeddedNats(server_dir / f"nkey{in_file}", users) as server,
        JetStream(server.url, nkeys_seed_str=seed) as nats,
    ):
        nats.add_stream(stream, SUBJECTS)
        config = NatsSinkConfig(url=server.url, nkey_seed=str(path) if in_file else seed)
        assert Writer(config).write(batch([1])).delivered == 1
        assert seed not in repr(config)


def test_a_mistyped_seed_is_not_shown(server_dir: Path) -> None:
    seed, public = make_seed()
    users = f"authorization {{ users: [ {{ nkey: {public} }} ] }}"
    with EmbeddedNats(server_dir / "mistyped", users) as server:
        writer = Writer(NatsSinkConfig(url=server.url, nkey_seed=seed[:-1]))
        with pytest.raises(SinkError) as caught:
            writer.write(batch([1]))
        assert caught.value.code == "credentials_unusable"
        assert seed[:20] not in str(caught.value)


def test_credentials_file(server_dir: Path, tmp_path: Path, stream: str) -> None:
    config, credentials = make_operator()
    path = tmp_path / "me.creds"
    path.write_text(credentials)
    with (
        EmbeddedNats(server_dir / "operator", config) as server,
        JetStream(server.url, user_credentials=str(path)) as nats,
    ):
        nats.add_stream(stream, SUBJECTS)
        sink = NatsSinkConfig(url=server.url, credentials_file=path)
        assert Writer(sink).write(batch([1])).delivered == 1


def test_tls(server_dir: Path, tmp_path: Path) -> None:
    ca, cert, key = make_certificates(server_dir / "certificates")
    other_ca, _, _ = make_certificates(tmp_path, "other")
    config = f'tls {{ cert_file: "{cert}", key_file: "{key}" }}'
    with EmbeddedNats(server_dir / "tls", config) as server:
        sink = NatsSinkConfig(url=server.url.replace("nats:", "tls:"), tls_ca_cert=ca)
        writer = Writer(sink, should_stop=lambda: True)
        with pytest.raises(SinkError) as caught:
            writer.write(batch([1]))
        assert caught.value.code == "no_stream"  # so the connection itself is secured

        for bad in (
            NatsSinkConfig(url=server.url),  # the system's CAs do not know ours
            NatsSinkConfig(url=server.url, tls_ca_cert=other_ca),
            NatsSinkConfig(url=server.url, tls=False),
            NatsSinkConfig(url=server.url, tls_ca_cert=tmp_path / "none.pem"),
        ):
            with pytest.raises(SinkError) as caught:
                Writer(bad).write(batch([1]))
            assert (caught.value.code, caught.value.transient) == ("tls_failed", False)


def test_publishing_over_tls(server_dir: Path, stream: str) -> None:
    ca, cert, key = make_certificates(server_dir / "certificates2")
    config = f'tls {{ cert_file: "{cert}", key_file: "{key}" }}'
    with EmbeddedNats(server_dir / "tls2", config) as server:
        context = verifying_context(ca)
        with JetStream(server.url, tls=context, tls_hostname="127.0.0.1") as nats:
            nats.add_stream(stream, SUBJECTS)
            sink = NatsSinkConfig(url=server.url, tls_ca_cert=ca)
            assert Writer(sink).write(batch(range(20_000))).delivered == 20_000
            assert_in_order(nats.messages(stream), 20_000)


def test_tls_required_but_not_offered(nats_server: EmbeddedNats) -> None:
    with pytest.raises(SinkError) as caught:
        Writer(NatsSinkConfig(url=nats_server.url, tls=True)).write(batch([1]))
    assert caught.value.code == "tls_failed"


def test_the_next_server_of_the_list(
    nats_server: EmbeddedNats, nats: JetStream, stream: str
) -> None:
    nats.add_stream(stream, SUBJECTS)
    config = NatsSinkConfig(url=f"nats://127.0.0.1:1,{nats_server.url}")
    writer = Writer(config)
    assert writer.write(batch([1])).delivered == 1
    assert writer.errors == []


def test_inspect(nats_server: EmbeddedNats, nats: JetStream, stream: str) -> None:
    config = NatsSinkConfig(url=nats_server.url)
    levels = {f.level for f in inspect(config, source="shop")}
    assert levels == {"ok", "error"}
    with pytest.raises(SinkError):
        find_stream(config, "shop")

    nats.add_stream(stream, ["shop.public.orders.*"], duplicate_window=30, storage="memory")
    findings = inspect(config, ["shop.public.orders.insert"], source="shop")
    assert {f.level for f in findings} == {"ok", "warning"}
    assert any("--dupe-window 2m" in f.fix for f in findings)
    assert any("memory" in f.message for f in findings)
    findings = inspect(config, ["shop.public.items.insert"], source="shop")
    assert any(f.level == "error" and "shop.public.items.insert" in f.message for f in findings)
    assert find_stream(config, "shop") == stream

    other = NatsSinkConfig(url=nats_server.url, stream="OTHER")
    assert any("OTHER" in f.message for f in inspect(other, source="shop") if f.level == "error")


def test_inspect_may_not_ask(server_dir: Path) -> None:
    config = """
    authorization { users: [ { user: a, password: a, permissions: { publish: "shop.>" } } ] }
    """
    with EmbeddedNats(server_dir / "ask", config) as server:
        findings = inspect(NatsSinkConfig(url=server.url, user="a", password="a"))
        assert [f.level for f in findings] == ["ok", "warning", "warning"]
        assert "$JS.API.>" in findings[1].fix
        assert "may publish to a part of it at most" in findings[2].message


def test_inspect_when_nothing_listens() -> None:
    (finding,) = inspect(NatsSinkConfig(url="nats://127.0.0.1:1"))
    assert finding.level == "error"
    assert finding.fix


def test_a_server_restarted_between_batches(own_server: EmbeddedNats, stream: str) -> None:
    writer = Writer(NatsSinkConfig(url=own_server.url))
    with JetStream(own_server.url) as nats:
        nats.add_stream(stream, SUBJECTS)
        assert writer.sink.write(batch([1])).delivered == 1
        own_server.restart()
        assert writer.sink.write(batch([2], first=2)).delivered == 1
        writer.sink.close()
        assert nats.info(stream).state.messages == 2


def test_a_stream_that_takes_few_at_once(server_dir: Path, stream: str) -> None:
    config = "jetstream { max_buffered_msgs: 20 }"
    with (
        EmbeddedNats(server_dir / "few", config) as server,
        JetStream(server.url) as nats,
    ):
        nats.add_stream(stream, SUBJECTS)
        writer = Writer(NatsSinkConfig(url=server.url))
        assert writer.write(batch([n % 2000 for n in range(6000)]), 60).delivered == 6000
        assert writer.codes == {"too_many_requests"}
        assert_in_order(nats.messages(stream), 6000)


def test_an_account_without_jetstream(server_dir: Path) -> None:
    config = "accounts { A: { users: [ { user: a, password: a } ] } }"
    with EmbeddedNats(server_dir / "account", config) as server:
        stop: list[bool] = []
        sink = NatsSinkConfig(url=server.url, user="a", password="a")
        writer = Writer(sink, should_stop=lambda: bool(stop))
        writer.start(batch([1]))
        writer.until_retry("jetstream_not_enabled")
        stop.append(True)
        with pytest.raises(SinkError):
            writer.result()
        assert any("JetStream is not enabled" in f.message for f in inspect(sink))


def test_acks_may_not_be_listened_for(server_dir: Path) -> None:
    config = """
    authorization { users: [ { user: a, password: a, permissions: { subscribe: "x.>" } } ] }
    """
    with EmbeddedNats(server_dir / "inbox", config) as server:
        with pytest.raises(SinkError) as caught:
            Writer(NatsSinkConfig(url=server.url, user="a", password="a")).write(batch([1]))
        assert caught.value.code == "permission_denied"
        assert "_INBOX.>" in caught.value.remedy
