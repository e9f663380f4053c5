"""nats-servers with special settings (logins, TLS, limits), and batches to publish to them."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nkeys
import psutil
import pyarrow as pa
from tests.pipeline import PATIENCE
from tests.waits import await_true

from penstock.config.nats import NatsSinkConfig
from penstock.core.delivery import Written
from penstock.core.errors import SinkError
from penstock.core.group_hash import group_hash
from penstock.core.message import WIRE_SCHEMA
from penstock.sinks.nats.sink import NatsSink


def batch(
    keys: Sequence[Any],
    *,
    first: int = 1,
    groups: Sequence[int] | None = None,
    old_groups: Sequence[int | None] | None = None,
    table: str | Sequence[str] = "orders",
    records: Sequence[dict[str, Any]] | None = None,
    changes: Sequence[dict[str, Any] | None] | None = None,
    actions: Sequence[str] | None = None,
    tag: str = "0123456789abcdef",
) -> pa.RecordBatch:
    """One row per key, numbered from `first`; the key is the group unless `groups` has others."""
    count = len(keys)
    numbers = range(first, first + count)
    tables = [table] * count if isinstance(table, str) else list(table)
    ids = [f"{tag}-{n}-0" for n in numbers]
    records = records or [{"id": k, "n": n} for k, n in zip(keys, numbers, strict=True)]
    metadata = [
        json.dumps({"table_schema": "public", "database": "shop", "idempotency_key": i})
        for i in ids
    ]
    columns = [
        [json.dumps(r) for r in records],
        [json.dumps(c) if c is not None else None for c in changes or [None] * count],
        list(actions) if actions is not None else ["insert"] * count,
        ["public"] * count,
        tables,
        metadata,
        ids,
        list(numbers),
        [0] * count,
        list(groups) if groups is not None else [group_hash(str(k).encode()) for k in keys],
        list(old_groups) if old_groups is not None else [None] * count,
        [None] * count,
        [0] * count,
    ]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, WIRE_SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=WIRE_SCHEMA)


class Writer:
    """A sink whose `write` runs in a thread, and the errors that it reported."""

    def __init__(self, config: NatsSinkConfig, **options: Any) -> None:
        self.errors: list[SinkError] = []
        self.retried = threading.Event()
        self.sink = NatsSink(config, name="orders", source="shop", on_retry=self._note, **options)
        self._thread: threading.Thread | None = None
        self._result: Written | BaseException | None = None

    def _note(self, error: SinkError, _seconds: float) -> None:
        self.errors.append(error)
        self.retried.set()

    @property
    def codes(self) -> set[str]:
        return {error.code for error in self.errors}

    def start(self, rows: pa.RecordBatch) -> None:
        def run() -> None:
            try:
                self._result = self.sink.write(rows)
            except BaseException as error:
                self._result = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def result(self, timeout: float = PATIENCE) -> Written:
        assert self._thread is not None
        self._thread.join(timeout)
        assert not self._thread.is_alive(), f"write goes on; errors: {self.errors[-3:]}"
        if isinstance(self._result, BaseException):
            raise self._result
        assert self._result is not None
        self.sink.close()
        return self._result

    def write(self, rows: pa.RecordBatch, timeout: float = PATIENCE) -> Written:
        self.start(rows)
        return self.result(timeout)

    def until_retry(self, code: str, timeout: float = PATIENCE) -> None:
        """Wait until the sink has reported `code`."""
        deadline = time.monotonic() + timeout
        while code not in self.codes:
            self.retried.clear()
            left = deadline - time.monotonic()
            assert left > 0, f"{code} never came, but {self.codes}"
            self.retried.wait(min(left, 1))


def make_certificates(folder: Path, name: str = "ca") -> tuple[Path, Path, Path]:
    """Make a CA and a certificate of 127.0.0.1 and localhost; return CA, certificate and key."""
    folder.mkdir(parents=True, exist_ok=True)
    ca, ca_key = folder / f"{name}.pem", folder / f"{name}.key"
    cert, key, request = folder / "server.pem", folder / "server.key", folder / "server.csr"
    extensions = folder / "server.ext"
    extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]

    def openssl(*arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    openssl("req", "-x509", *new_key, "-days", "2", "-subj", f"/CN={name}", "-keyout", ca_key,
            "-out", ca)  # fmt: skip
    openssl("req", *new_key, "-subj", "/CN=localhost", "-keyout", key, "-out", request)
    openssl("x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial",
            "-days", "2", "-extfile", extensions, "-out", cert)  # fmt: skip
    return ca, cert, key


def make_seed(kind: int = nkeys.PREFIX_BYTE_USER) -> tuple[str, str]:
    """Return a new nkey: its seed and its public key."""
    seed = bytes(nkeys.encode_seed(os.urandom(32), kind)).decode()
    return seed, nkeys.from_seed(bytearray(seed.encode())).public_key.decode()


def make_jwt(signer_seed: str, issuer: str, subject: str, name: str, claims: dict[str, Any]) -> str:
    """Return a NATS JWT: `claims` about `subject`, signed by `issuer`."""

    def part(value: dict[str, Any]) -> bytes:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")

    body = {
        "jti": name, "iat": int(time.time()), "iss": issuer, "sub": subject, "name": name,
        "nats": {**claims, "version": 2},
    }  # fmt: skip
    signed = part({"typ": "JWT", "alg": "ed25519-nkey"}) + b"." + part(body)
    signature = nkeys.from_seed(bytearray(signer_seed.encode())).sign(signed)
    return (signed + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")).decode()


def make_operator() -> tuple[str, str]:
    """Return the configuration of a server in operator mode, and a user's credentials file."""
    operator_seed, operator = make_seed(nkeys.PREFIX_BYTE_OPERATOR)
    account_seed, account = make_seed(nkeys.PREFIX_BYTE_ACCOUNT)
    _, system = make_seed(nkeys.PREFIX_BYTE_ACCOUNT)
    user_seed, user = make_seed()
    limits = {
        "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": True,
        "conn": -1, "leaf": -1,
    }  # fmt: skip
    storage = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    operator_jwt = make_jwt(
        operator_seed, operator, operator, "op", {"type": "operator", "system_account": system}
    )
    account_jwt = make_jwt(
        operator_seed, operator, account, "shop",
        {"type": "account", "limits": limits | storage},
    )  # fmt: skip
    system_jwt = make_jwt(
        operator_seed, operator, system, "SYS", {"type": "account", "limits": limits}
    )
    user_limits = {"subs": -1, "data": -1, "payload": -1}
    user_jwt = make_jwt(account_seed, account, user, "me", {"type": "user", **user_limits})
    config = (
        f"operator: {operator_jwt}\nsystem_account: {system}\nresolver: MEMORY\n"
        f"resolver_preload {{\n {account}: {account_jwt}\n {system}: {system_jwt}\n}}\n"
    )
    credentials = (
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user_seed}\n------END USER NKEY SEED------\n"
    )
    return config, credentials


def freeze(pid: int) -> None:
    """Stop a process with SIGSTOP, and wait until it has stopped: until then it may still answer."""
    os.kill(pid, signal.SIGSTOP)
    process = psutil.Process(pid)
    await_true(lambda: process.status() == psutil.STATUS_STOPPED)
