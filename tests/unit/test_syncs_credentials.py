"""The key that tokens are encrypted with."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from penstock.syncs.credentials import SecretKey, secret_key
from penstock.syncs.errors import SyncError

ONE, TWO = "k" * 32, "l" * 40


def test_only_the_same_key_and_credential_open() -> None:
    key = SecretKey([ONE])
    sealed = key.seal(b"token", "crm")
    assert b"token" not in sealed
    assert sealed != key.seal(b"token", "crm")
    assert key.open(key.key_id, sealed, "crm") == b"token"
    assert SecretKey([TWO, ONE]).open(key.key_id, sealed, "crm") == b"token"
    for other, about in ((SecretKey([TWO]), "crm"), (key, "erp")):
        with pytest.raises(SyncError, match="encrypted with another key") as caught:
            other.open(key.key_id, sealed, about)
        assert "PENSTOCK_SECRET_KEY" in caught.value.remedy
    assert ONE not in repr(key)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(SyncError, match="openssl rand") as caught:
        secret_key(None, {"PENSTOCK_SECRET_KEY": "hush"})
    assert "hush" not in str(caught.value)


def test_an_external_store_needs_the_variable(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match="Set PENSTOCK_SECRET_KEY"):
        secret_key(None, {})
    assert secret_key(tmp_path, {"PENSTOCK_SECRET_KEY": ONE}).key_id == SecretKey([ONE]).key_id
    assert not list(tmp_path.iterdir())


def test_a_file_beside_the_embedded_store(tmp_path: Path) -> None:
    made = secret_key(tmp_path, {})
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert secret_key(tmp_path, {}).key_id == made.key_id
    file.chmod(0o640)
    with pytest.raises(SyncError, match="chmod 600"):
        secret_key(tmp_path, {})
