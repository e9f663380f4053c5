"""Ack tokens: which consumer, which message, which of its deliveries.

32 characters, the URL-safe base64 of 24 bytes: consumer id (32 bits), lsn (64), idx (48) and the
delivery's number (48).
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Sequence
from typing import Final

LENGTH: Final = 32

_TOKEN: Final = struct.Struct(">IQHIHI")
_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")
_LOW: Final = 0xFFFF_FFFF

Ref = tuple[int, int, int]
"""lsn, idx, number."""


def make_tokens(consumer: int, first: int, positions: Sequence[tuple[int, int]]) -> list[str]:
    """Return the tokens of deliveries numbered from `first` on."""
    pack = _TOKEN.pack
    packed = b"".join(
        [
            pack(consumer, lsn, idx >> 32, idx & _LOW, number >> 32, number & _LOW)
            for number, (lsn, idx) in enumerate(positions, first)
        ]
    )
    text = base64.urlsafe_b64encode(packed).decode("ascii")
    return [text[at : at + LENGTH] for at in range(0, len(text), LENGTH)]


def read_tokens(consumer: int, tokens: Sequence[str]) -> list[Ref | None]:
    """Return what tokens stand for, None for one that is not of this consumer."""
    packed = _decode("".join(tokens)) if all(len(t) == LENGTH for t in tokens) else None
    if packed is not None:
        return [
            (lsn, high << 32 | low, number_high << 32 | number_low) if owner == consumer else None
            for owner, lsn, high, low, number_high, number_low in _TOKEN.iter_unpack(packed)
        ]
    if len(tokens) == 1:
        return [None]
    return [ref for token in tokens for ref in read_tokens(consumer, (token,))]


def _decode(text: str) -> bytes | None:
    try:
        packed = binascii.a2b_base64(text.encode("ascii").translate(_URL_SAFE), strict_mode=True)
    except (UnicodeEncodeError, binascii.Error):
        return None
    return packed if len(packed) * 4 == len(text) * 3 else None
