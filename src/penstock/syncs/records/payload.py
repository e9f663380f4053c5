"""What Postgres can hold of an object's JSON, and the hash by which a changed one is known.

No I/O. The hash is that of the text: an object whose text has changed and whose value has not is
recognised where both are at hand, by Postgres.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Final

import msgspec
from xxhash import xxh3_128_digest

MAX_BYTES: Final = 16 * 1024 * 1024
"""The largest object that is kept."""
MAX_ID_BYTES: Final = 1000
"""The longest id of an object: an index takes no more than 2,700 bytes."""
_MAX_DIGITS: Final = 131_071  # before the point, and 16,383 behind it, as numeric has them
_MAX_FRACTION: Final = 16_383


class Unfit(ValueError):  # noqa: N818 - a verdict, and no failure
    """Postgres can't hold an object; the message says why."""


def payload_hash(data: bytes) -> bytes:
    """Return the 16 bytes that identify an object's text."""
    return xxh3_128_digest(data)


def check_payload(data: bytes) -> None:
    """Raise `Unfit` for an object that can't be kept."""
    if len(data) > MAX_BYTES:
        raise Unfit(f"it has {len(data):,} bytes, and at most {MAX_BYTES:,} are kept")
    try:
        value = _decode(data)
        if b"\\u0000" in data:
            _check_nul(value)
    except Unfit:
        raise
    except RecursionError:
        raise Unfit("it has too many levels") from None
    except (ValueError, UnicodeError) as error:  # msgspec's are among them
        raise Unfit(_reason(error)) from None


def _number(text: str) -> float:
    if "e" in text or "E" in text:
        value = Decimal(text)
        exponent = int(value.as_tuple().exponent)
        if value.adjusted() > _MAX_DIGITS or -exponent > _MAX_FRACTION:
            raise Unfit(f"the number {text[:50]} is out of the range of Postgres' numeric")
    return 0.0


_decode: Final = msgspec.json.Decoder(dict[str, Any], float_hook=_number).decode


def _reason(error: Exception) -> str:
    if isinstance(error, Unfit):
        return str(error)
    if isinstance(error, UnicodeError):
        return "it is not UTF-8"
    return f"it can't be read as a JSON object: {str(error)[:200]}"


def _check_nul(value: Any) -> None:
    if isinstance(value, str):
        if "\0" in value:
            raise Unfit("a text in it has a NUL character (\\u0000), which Postgres can't hold")
    elif isinstance(value, dict):
        for name, member in value.items():
            _check_nul(name)
            _check_nul(member)
    elif isinstance(value, list):
        for member in value:
            _check_nul(member)


def check_id(upstream_id: str) -> None:
    """Raise `Unfit` for the id of an object that can't be kept."""
    if not upstream_id:
        raise Unfit("its id is empty")
    if "\0" in upstream_id:
        raise Unfit("its id has a NUL character, which Postgres can't hold")
    try:
        size = len(upstream_id.encode())
    except UnicodeEncodeError:
        raise Unfit("its id is no text: it has half of a surrogate pair") from None
    if size > MAX_ID_BYTES:
        raise Unfit(f"its id has {size:,} bytes, and at most {MAX_ID_BYTES:,} are kept")
