"""A pipeline's config against real nats-servers: each way to log in, TLS, and the wrong ones."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import SecretStr
from tests.waits import await_true

from penstock.config.nats import NatsSinkConfig
from penstock.core.errors import PipelineError, SinkError
from penstock.core.tls import verifying_context
from penstock.embedded.handles import JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.outbox.settings import OutboxSinkSettings, read
from penstock.sinks.nats.check import inspect

from .nats_servers import Writer, batch, make_certificates, make_operator, make_seed

PASSWORD, TOKEN = "pa55-w0rd-Xy", "t0ken-Xy-1234567890"
WRONG = "wr0ng-Xy-1234567890"
STREAM = "LOGINS"


def rows(count: int = 3) -> pa.RecordBatch:
    """Return rows of the outbox `orders`."""
    records = [
        {"id": n, "dedup_key": None, "payload": {"n": n}, "headers": {}, "created_at": None}
        for n in range(1, count + 1)
    ]
    return batch(range(count), records=records, groups=[0] * count, table="outbox_orders")


def settings(
    url_: str, environ: Mapping[str, str] | None = None, /, **keys: Any
) -> OutboxSinkSettings:
    """Return the sink of a pipeline whose config has `keys`."""
    config = {"sink_type": "nats", "url": url_, "subject": "orders.{op}", **keys}
    return read(config, environ or {}).sink(source="group", outbox="orders")


@dataclass
class Server:
    """A server that runs, and what the tests need to know of it."""

    nats: EmbeddedNats
    admin: dict[str, Any]
    """How nats-py logs in."""
    secrets: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.nats.url

    def delivers(self, config: OutboxSinkSettings) -> None:
        """Have rows delivered by `config`, and read them back."""
        with JetStream(self.url, **self.admin) as nats:
            nats.add_stream(STREAM, "orders.>")
            try:
                written = Writer(config).write(rows())
                assert (written.delivered, written.dead) == (3, [])
                messages = nats.messages(STREAM)
                assert [m.data for m in messages] == [b'{"n": 1}', b'{"n": 2}', b'{"n": 3}']
                assert [m.headers["Nats-Msg-Id"] for m in messages] == [
                    "orders#1", "orders#2", "orders#3",
                ]  # fmt: skip
                assert {f.level for f in inspect(config)} == {"ok"}
            finally:
                nats.delete_stream(STREAM)

    def refuses(self, config: OutboxSinkSettings, code: str, *secrets: str) -> SinkError:
        """Have `config` refused by the error `code`, in which none of the secrets stands."""
        with pytest.raises(SinkError) as caught:
            Writer(config).write(rows())
        error = caught.value
        assert (error.code, error.transient) == (code, False)
        assert error.remedy
        found = inspect(config)
        assert [(f.level, f.message) for f in found] == [("error", error.message)]
        shown = f"{error} {error!r} {error.message} {error.remedy} {found} {config!r} {config}"
        for secret in (*secrets, *self.secrets.values(), WRONG, PASSWORD, TOKEN):
            assert secret not in shown, f"{code} shows a secret"
        return error


@pytest.fixture(autouse=True)
def _log(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No test logs a secret, at any level."""
    with caplog.at_level(logging.DEBUG):
        yield
    servers = [v for v in request.node.funcargs.values() if isinstance(v, Server)]
    secrets = [secret for server in servers for secret in server.secrets.values()]
    logged = "".join(record.getMessage() for record in caplog.get_records("call"))
    for secret in (*secrets, WRONG, PASSWORD, TOKEN):
        assert secret not in logged


@pytest.fixture(scope="module")
def start(server_dir: Path) -> Iterator[Callable[..., Server]]:
    """Start servers that live as long as this file's tests."""
    running: list[EmbeddedNats] = []

    def start(config: str, **rest: Any) -> Server:
        server = EmbeddedNats(server_dir / f"login{uuid.uuid4().hex[:8]}", config)
        server.start()
        running.append(server)
        return Server(server, **rest)

    yield start
    for server in running:
        server.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logins")


def as_file(folder: Path, text: str) -> Path:
    path = folder / uuid.uuid4().hex
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def by_user(start: Callable[..., Server]) -> Server:
    config = (
        "authorization { users: [\n"
        f'  {{ user: relay, password: "{PASSWORD}" }}\n'
        f'  {{ user: half, password: "{PASSWORD}", permissions: {{\n'
        '      publish: { allow: ["other.>", "$JS.API.>"] }, subscribe: "_INBOX.>" } }\n'
        f'  {{ user: deaf, password: "{PASSWORD}", permissions: {{ subscribe: "x" }} }}\n'
        "] }"
    )
    return start(config, admin={"user": "relay", "password": PASSWORD})


@pytest.fixture(scope="module")
def by_token(start: Callable[..., Server]) -> Server:
    return start(f'authorization {{ token: "{TOKEN}" }}', admin={"token": TOKEN})


@pytest.fixture(scope="module")
def by_nkey(start: Callable[..., Server], folder: Path) -> Server:
    seed, public = make_seed()
    return start(
        f"authorization {{ users: [ {{ nkey: {public} }} ] }}",
        admin={"nkeys_seed_str": seed},
        secrets={"seed": seed},
        files={"seed": as_file(folder, f"{seed}\n{public}\n")},
    )


@pytest.fixture(scope="module")
def by_jwt(start: Callable[..., Server], folder: Path) -> Server:
    config, credentials = make_operator()
    path = as_file(folder, credentials)
    lines = credentials.splitlines()
    return start(
        config,
        admin={"user_credentials": str(path)},
        secrets={"jwt": lines[1], "seed": lines[5]},
        files={"credentials": path},
    )


_PAGE = " ".join((Path(__file__).parents[2] / "docs/how-to/troubleshooting.md").read_text().split())


def documented(text: str) -> None:
    """See that the troubleshooting page has `text`, with addresses and names of its own."""
    for pattern, shown in (
        (r"127\.0\.0\.1:\d+", "127.0.0.1:4222"),
        (r"_INBOX\.\w+\.", "_INBOX.e9e0bd9b5e8f87ab."),
        (r"_ssl\.c:\d+", "_ssl.c:1006"),
        (r"/\S+\.pem", "/etc/penstock/ca.pem"),
        (r"/\S+creds", "/etc/penstock/relay.creds"),
    ):
        text = re.sub(pattern, shown, text)
    page = _PAGE.replace("127.0.0.1:4223", "127.0.0.1:4222")
    page = page.replace("10.0.0.1:4222", "127.0.0.1:4222").replace(
        "10.0.0.2:4222", "127.0.0.1:4222"
    )
    assert " ".join(text.split()) in page


def error_of(config: OutboxSinkSettings) -> str:
    """Return the error, once a sink of `config` can't go on or has begun to wait."""
    stop: list[bool] = []
    writer = Writer(config, should_stop=lambda: bool(stop))
    writer.start(rows())
    await_true(lambda: bool(writer.errors) or not writer.running)
    stop.append(True)
    with pytest.raises(SinkError) as caught:
        writer.result()
    return str(caught.value)


def test_the_troubleshooting_page_has_each_error(
    by_user: Server, by_tls: Server, by_certificate: Server, start: Callable[..., Server],
    folder: Path,
) -> None:  # fmt: skip
    login = {"username": "relay", "password": PASSWORD}
    documented(error_of(settings("nats://127.0.0.1:1")))
    documented(error_of(settings("nats://127.0.0.1:1,nats://127.0.0.1:2")))
    documented(error_of(settings(by_user.url)))
    documented(error_of(settings(by_user.url, username="deaf", password=PASSWORD)))
    documented(error_of(settings(by_user.url, **login)))  # no stream
    with JetStream(by_user.url, **by_user.admin) as nats:
        nats.add_stream(STREAM, "orders.>")
        documented(error_of(settings(by_user.url, username="half", password=PASSWORD)))
        documented(error_of(settings(by_user.url, stream="SHOP", **login)))
        nats.delete_stream(STREAM)
    none = start("accounts { A: { users: [ { user: a, password: a } ] } }", admin={})
    documented(error_of(settings(none.url, username="a", password="a")))

    documented(error_of(settings(by_tls.url.replace("nats:", "tls:"))))
    for config in (
        settings(by_tls.url, tls_enabled=False),
        settings(by_user.url, tls_enabled=True),
        settings(by_certificate.url, tls_ca_cert=str(by_certificate.files["ca"])),
    ):
        documented(error_of(config).partition(": ")[2].partition(". ")[0])
    documented(error_of(settings(by_tls.url, tls_ca_cert=str(folder / "none.pem"))))

    missing, empty = folder / "missing-creds", folder / "empty-creds"
    empty.write_text("x")
    nkeys = start(f"authorization {{ users: [ {{ nkey: {make_seed()[1]} }} ] }}", admin={})
    documented(error_of(settings(nkeys.url, credentials_file=str(missing))))
    documented(error_of(settings(nkeys.url, credentials_file=str(empty))).partition(" a file")[0])
    documented(error_of(settings(nkeys.url, nkey_seed="SUWRONG")).partition(" a file")[0])

    for key, value in (("password", "${file:/run/secrets/nats}"), ("url", "${env:NATS_URL}")):
        with pytest.raises(PipelineError) as caught:
            settings("nats://n", **{key: value})
        error = caught.value
        documented(f"{error.message} {error.remedy}".partition(" where the relay runs")[0])


def tls_server(start: Callable[..., Server], folder: Path, rest: str = "", **more: Any) -> Server:
    ca, cert, key = make_certificates(folder / f"tls{uuid.uuid4().hex[:8]}")
    trusted = verifying_context(ca)
    trusted.load_cert_chain(cert, key)
    return start(
        f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{ca}" {rest} }}\n'
        + more.pop("config", ""),
        admin={"tls": trusted, "tls_hostname": "127.0.0.1", **more},
        files={"ca": ca, "cert": cert, "key": key},
    )


@pytest.fixture(scope="module")
def by_tls(start: Callable[..., Server], folder: Path) -> Server:
    return tls_server(
        start, folder, user="relay", password=PASSWORD,
        config=f'authorization {{ user: relay, password: "{PASSWORD}" }}',
    )  # fmt: skip


@pytest.fixture(scope="module")
def by_certificate(start: Callable[..., Server], folder: Path) -> Server:
    return tls_server(start, folder, ", verify: true")


def test_user_and_password(by_user: Server, folder: Path) -> None:
    login = {"username": "relay", "password": PASSWORD}
    by_user.delivers(settings(by_user.url, **login))
    by_user.delivers(settings(by_user.url.replace("://", f"://relay:{PASSWORD}@")))
    file = as_file(folder, f"{PASSWORD}\n")
    by_user.delivers(
        settings(
            "${env:NATS_URL}",
            {"NATS_URL": by_user.url, "NATS_USER": "relay"},
            username="${env:NATS_USER}",
            password=f"${{file:{file}}}",
        )
    )


@pytest.mark.parametrize(
    "login",
    [
        {"username": "relay", "password": WRONG},
        {"username": "unknown-user", "password": PASSWORD},
        {"token": PASSWORD},
        {"nkey_seed": make_seed()[0]},
        {},
    ],
    ids=["password", "user", "token", "nkey", "none"],
)
def test_no_user_of_the_server(by_user: Server, login: dict[str, str]) -> None:
    error = by_user.refuses(
        settings(by_user.url, **login), "authorization_violation", login.get("nkey_seed", WRONG)
    )
    assert str(by_user.nats.port) in error.message


def test_remedies_name_the_settings_that_the_reader_has(by_user: Server, by_tls: Server) -> None:
    """The same fault, of a pipeline of an outbox and of a sink of the file."""
    login = {"username": "relay", "password": WRONG}
    pipeline = by_user.refuses(settings(by_user.url, **login), "authorization_violation")
    assert "Set `username` and `password`" in pipeline.remedy
    sink = NatsSinkConfig(url=by_user.url, user="relay", password=SecretStr(WRONG))
    with pytest.raises(SinkError) as caught:
        Writer(sink).write(rows())
    assert "Set `user` and `password`" in caught.value.remedy
    assert caught.value.message == pipeline.message
    pipeline = by_tls.refuses(settings(by_tls.url, tls_enabled=False), "tls_failed")
    assert "`tls_enabled` is false" in pipeline.message
    assert "`tls_enabled`" in pipeline.remedy
    with pytest.raises(SinkError, match=r"`tls` is false\. Leave `tls` out"):
        Writer(NatsSinkConfig(url=by_tls.url, tls=False)).write(rows())


def test_the_error_has_the_reason_of_each_server(by_user: Server) -> None:
    seeds = f"nats://127.0.0.1:1,{by_user.url},nats://127.0.0.1:2"
    error = by_user.refuses(
        settings(seeds, username="relay", password=WRONG), "authorization_violation"
    )
    assert error.message == (
        "None of 3 servers can be used: Nothing listens at 127.0.0.1:1 (connection refused); "
        f"{by_user.url} refuses the login: Authorization Violation; "
        "Nothing listens at 127.0.0.1:2 (connection refused)."
    )
    by_user.delivers(settings(seeds, username="relay", password=PASSWORD))


def test_a_wrong_password_in_the_url_or_from_a_reference(by_user: Server) -> None:
    url = by_user.url.replace("://", f"://relay:{WRONG}@")
    by_user.refuses(settings(url), "authorization_violation")
    config = settings(by_user.url, {"P": WRONG}, username="relay", password="${env:P}")
    by_user.refuses(config, "authorization_violation")


def test_a_subject_that_the_user_may_not_publish_to(by_user: Server) -> None:
    """It is tried again, as a reload of the server's configuration mends it; and it names both."""
    config = settings(by_user.url, username="half", password=PASSWORD)
    with JetStream(by_user.url, **by_user.admin) as nats:
        nats.add_stream(STREAM, "orders.>")
        stop: list[bool] = []
        writer = Writer(config, should_stop=lambda: bool(stop))
        writer.start(rows())
        writer.until_retry("permission_denied")
        stop.append(True)
        with pytest.raises(SinkError) as caught:
            writer.result()
        assert nats.messages(STREAM) == []
        nats.delete_stream(STREAM)
    error = caught.value
    assert (error.code, error.transient) == ("permission_denied", True)
    assert "may not publish to 'orders.insert'" in error.message
    assert 'publish { allow: ["orders.insert"] }' in error.remedy
    assert PASSWORD not in f"{error} {error.remedy}"


def test_acks_that_the_user_may_not_read(by_user: Server) -> None:
    with pytest.raises(SinkError) as caught:
        Writer(settings(by_user.url, username="deaf", password=PASSWORD)).write(rows())
    error = caught.value
    assert (error.code, error.transient) == ("permission_denied", False)
    assert "for Subscription to" in error.message
    assert 'subscribe to "_INBOX.>"' in error.remedy
    assert PASSWORD not in f"{error} {error.remedy}"


def test_token(by_token: Server) -> None:
    by_token.delivers(settings(by_token.url, token=TOKEN))
    by_token.delivers(settings(by_token.url, {"T": TOKEN}, token="${env:T}"))
    by_token.delivers(settings(by_token.url.replace("://", f"://{TOKEN}@")))
    by_token.refuses(settings(by_token.url, token=WRONG), "authorization_violation")
    by_token.refuses(settings(by_token.url), "authorization_violation")
    wrong = by_token.url.replace("://", f"://{WRONG}@")
    by_token.refuses(settings(wrong), "authorization_violation")
    user = settings(by_token.url, username="relay", password=TOKEN)
    by_token.refuses(user, "authorization_violation")


def test_nkey(by_nkey: Server, folder: Path) -> None:
    seed, file = by_nkey.secrets["seed"], by_nkey.files["seed"]
    by_nkey.delivers(settings(by_nkey.url, nkey_seed=seed))
    by_nkey.delivers(settings(by_nkey.url, nkey_seed=str(file)))
    by_nkey.delivers(settings(by_nkey.url, {"SEED": seed}, nkey_seed="${env:SEED}"))
    other, _ = make_seed()
    by_nkey.refuses(settings(by_nkey.url, nkey_seed=other), "authorization_violation", other)
    in_file = str(as_file(folder, other))
    by_nkey.refuses(settings(by_nkey.url, nkey_seed=in_file), "authorization_violation", other)
    by_nkey.refuses(settings(by_nkey.url), "authorization_violation")


@pytest.mark.parametrize(
    "spoil",
    [lambda s: s[:-1], lambda s: s[:20] + "0" + s[21:], lambda s: s.lower(), lambda s: s + "A"],
    ids=["short", "no-base32", "lower", "long"],
)
def test_a_seed_that_is_none(by_nkey: Server, spoil: Callable[[str], str]) -> None:
    seed = spoil(by_nkey.secrets["seed"])
    config = settings(by_nkey.url, nkey_seed=seed)
    error = by_nkey.refuses(config, "credentials_unusable", seed, seed[2:30])
    assert "nkey_seed" in error.message


@pytest.mark.parametrize("key", ["nkey_seed", "credentials_file"])
@pytest.mark.parametrize("what", ["missing", "a folder", "empty", "something else", "no text"])
def test_a_login_file_that_is_none(by_nkey: Server, folder: Path, key: str, what: str) -> None:
    path = folder / f"{key} {what}"
    if what == "a folder":
        path.mkdir(exist_ok=True)
    elif what != "missing":
        text = {
            "empty": b"",
            "something else": b"see " + WRONG.encode(),
            "no text": b"\xff\xfe\x00",
        }
        path.write_bytes(text[what])
    error = by_nkey.refuses(settings(by_nkey.url, **{key: str(path)}), "credentials_unusable")
    assert key in error.message
    assert "nsc generate creds" in error.remedy


def test_jwt_credentials(by_jwt: Server, folder: Path) -> None:
    path = by_jwt.files["credentials"]
    by_jwt.delivers(settings(by_jwt.url, credentials_file=str(path)))
    by_jwt.delivers(settings(by_jwt.url, {"C": str(path)}, credentials_file="${env:C}"))
    _, others = make_operator()
    jwt, seed = others.splitlines()[1], others.splitlines()[5]
    config = settings(by_jwt.url, credentials_file=str(as_file(folder, others)))
    by_jwt.refuses(config, "authorization_violation", jwt, seed)
    by_jwt.refuses(settings(by_jwt.url), "authorization_violation")


def test_jwt_credentials_of_two_users(by_jwt: Server, folder: Path) -> None:
    """The JWT of one with the seed of another: its signature is not the user's."""
    seed, _ = make_seed()
    mixed = by_jwt.files["credentials"].read_text().replace(by_jwt.secrets["seed"], seed)
    config = settings(by_jwt.url, credentials_file=str(as_file(folder, mixed)))
    by_jwt.refuses(config, "authorization_violation", seed)


def test_tls_with_a_login(by_tls: Server) -> None:
    login = {"username": "relay", "password": PASSWORD}
    ca = str(by_tls.files["ca"])
    by_tls.delivers(settings(by_tls.url, tls_ca_cert=ca, **login))
    secured = by_tls.url.replace("nats:", "tls:")
    by_tls.delivers(settings(secured, tls_enabled=True, tls_ca_cert=ca, **login))
    by_tls.delivers(
        settings(
            secured.replace("127.0.0.1", "localhost"), {"ON": "true", "CA": ca},
            tls_enabled="${env:ON}", tls_ca_cert="${env:CA}", **login,
        )
    )  # fmt: skip
    wrong = settings(secured, tls_ca_cert=ca, username="relay", password=WRONG)
    by_tls.refuses(wrong, "authorization_violation")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "CERTIFICATE_VERIFY_FAILED"),
        ({"tls_enabled": True}, "CERTIFICATE_VERIFY_FAILED"),
        ({"tls_ca_cert": "other"}, "CERTIFICATE_VERIFY_FAILED"),
        ({"tls_enabled": False}, "requires TLS"),
        ({"tls_ca_cert": "missing"}, "No such file"),
        ({"tls_ca_cert": "text"}, "text"),
        ({"tls_ca_cert": "ca", "tls_cert": "text", "tls_key": "key"}, "text"),
        ({"tls_ca_cert": "ca", "tls_cert": "ca", "tls_key": "key"}, "MISMATCH"),
    ],
    ids=["system", "demanded", "other", "off", "missing", "no-pem", "no-cert", "other-key"],
)
def test_certificates_that_are_wrong(
    by_tls: Server, folder: Path, keys: dict[str, Any], message: str
) -> None:
    (folder / "text").write_text(WRONG)
    files = {**by_tls.files, "missing": folder / "missing.pem", "text": folder / "text"}
    if "other" in keys.values():
        files["other"] = make_certificates(folder / "other", "other")[0]
    given = {key: str(files[v]) if isinstance(v, str) else v for key, v in keys.items()}
    config = settings(by_tls.url, username="relay", password=PASSWORD, **given)
    assert message in by_tls.refuses(config, "tls_failed").message


def test_a_name_that_is_not_in_the_certificate(by_tls: Server) -> None:
    url = by_tls.url.replace("127.0.0.1", "127.1")  # the same address by another name
    ca = str(by_tls.files["ca"])
    config = settings(url, tls_ca_cert=ca, username="relay", password=PASSWORD)
    error = by_tls.refuses(config, "tls_failed")
    assert "'127.1'" in error.message
    assert "a name that is in the certificate" in error.remedy


def test_a_client_certificate(by_certificate: Server, folder: Path) -> None:
    ca, cert, key = (str(by_certificate.files[name]) for name in ("ca", "cert", "key"))
    own = {"tls_ca_cert": ca, "tls_cert": cert, "tls_key": key}
    by_certificate.delivers(settings(by_certificate.url, **own))
    error = by_certificate.refuses(settings(by_certificate.url, tls_ca_cert=ca), "tls_failed")
    assert "asks for a client's certificate" in error.message
    assert "`tls_cert`" in error.remedy
    _, strange, its_key = make_certificates(folder / "strange", "strange")
    others = {"tls_ca_cert": ca, "tls_cert": str(strange), "tls_key": str(its_key)}
    # Its refusal may be lost with the connection; it is asked again then.
    with pytest.raises(SinkError) as caught:
        Writer(settings(by_certificate.url, **others)).write(rows())
    assert (caught.value.code, caught.value.transient) == ("tls_failed", False)
    assert "ALERT" in caught.value.message


def test_tls_demanded_of_a_server_without(by_user: Server) -> None:
    login = {"username": "relay", "password": PASSWORD}
    for config in (
        settings(by_user.url, tls_enabled=True, **login),
        settings(by_user.url.replace("nats:", "tls:"), **login),
    ):
        assert "offers none" in by_user.refuses(config, "tls_failed").message
