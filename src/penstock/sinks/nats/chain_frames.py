"""The frames of rows that go at once: each with the headers that make it part of a chain."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

_ID: Final = b"\r\nNats-Msg-Id: "
_VERSION_LINE: Final = len(b"NATS/1.0\r\n")
_EXPECTED_STREAM: Final = b"NATS/1.0\r\nNats-Expected-Stream: "


def as_batch(frames: Sequence[memoryview]) -> bytes:
    """Return the frames of an atomic batch: theirs, with the headers that make a batch of them.

    The first message has a reply, which comes early if the stream takes no batches, and the last
    has one for the whole batch.
    """
    start = b"NATS/1.0\r\nNats-Batch-Id: " + secrets.token_hex(12).encode()
    start += b"\r\nNats-Batch-Sequence: "
    pieces: list[bytes] = []
    last = len(frames)
    for number, view in enumerate(frames, 1):
        line, _, rest = bytes(view).partition(b"\r\n")
        _, subject, reply, header, total = line.split(b" ")
        added = b"%b%d\r\n" % (start, number)
        if number == last:
            added += b"Nats-Batch-Commit: 1\r\n"
        more = len(added) - _VERSION_LINE
        to = b"%b %b" % (subject, reply) if number in (1, last) else subject
        pieces += (b"HPUB %b %d %d\r\n" % (to, int(header) + more, int(total) + more), added)
        pieces.append(rest[_VERSION_LINE:])
    return b"".join(pieces)


def as_links(
    frames: Sequence[memoryview], last: bytes, stream: bytes = b"", never: bytes = b""
) -> list[bytes]:
    """Return frames of which each but the first is refused where it does not follow the one before.

    That is the case where the one before was lost or refused, and also where another
    publisher has written to the stream meanwhile. Fewer are returned where two have one id, or one has
    the id `last`: what is behind the second would follow the first.

    Args:
        frames: The frames of neighbours.
        last: The id of the message that the stream has stored last of the sink's.
        stream: The stream that is the only one to take those behind the first.
        never: An id that no message has. With it, what is behind the second is refused unless the
            stream has it already.
    """
    made: list[bytes] = []
    known = {last}
    before = b""
    for view in frames:
        frame = bytes(view)
        line, _, rest = frame.partition(b"\r\n")
        if before:
            added = b"NATS/1.0\r\n"
            if stream and not rest.startswith(_EXPECTED_STREAM):
                added += b"Nats-Expected-Stream: %b\r\n" % stream
            follows = never if never and len(made) > 1 else before
            added += b"Nats-Expected-Last-Msg-Id: %b\r\n" % follows
            more = len(added) - _VERSION_LINE
            to, header, total = line.rsplit(b" ", 2)
            frame = b"%b %d %d\r\n%b%b" % (
                to, int(header) + more, int(total) + more, added, rest[_VERSION_LINE:]
            )  # fmt: skip
        made.append(frame)
        at = rest.index(_ID) + len(_ID)
        before = rest[at : rest.index(b"\r\n", at)]
        if before in known:
            break
        known.add(before)
    return made
