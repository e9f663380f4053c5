"""Masking of passwords, in well-formed and in broken URLs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.redact import redact_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://app:pw@db:5432/shop", "postgresql://app:***@db:5432/shop"),
        ("postgresql://app@db/shop", "postgresql://app@db/shop"),
        ("postgresql://db/shop?user=a&password=pw&x=1", "postgresql://db/shop?user=a&password=***&x=1"),
        ("postgresql://:pw@/shop", "postgresql://:***@/shop"),
        ("postgresql://app:p@w@db/shop", "postgresql://app:***@db/shop"),
        ("postgresql://app:p/w@db/shop", "postgresql://app:***@db/shop"),
        ("host=db password=pw user=a", "host=db password=*** user=a"),
        ("host=db password = 'p w' user=a", "host=db password = *** user=a"),
        ("password='p w", "password=***"),
        ("sslpassword=pw", "sslpassword=***"),
        ("nats://a:pw@h:1,nats://b:pw@g:2", "nats://***@h:1,nats://***@g:2"),
        ("nats://token@h:1", "nats://***@h:1"),
        ("app:pw@db/shop", "***@db/shop"),
        ("https://h/?api_key=pw#x", "https://h/?api_key=***#x"),
        ("", ""),
    ],
)  # fmt: skip
def test_redact(url: str, shown: str) -> None:
    assert redact_url(url) == shown


@given(st.text(min_size=4).map("zQ".__add__), st.text("abc", min_size=1))
def test_a_password_never_shows(password: str, user: str) -> None:
    if "," in password and "://" in password:
        return  # two URLs, then
    assert "zQ" not in redact_url(f"postgres://{user}:{password}@host/db")
