"""The frames of a few rows, put together as bytes.

Of a few rows the calls of Arrow's kernels cost more than the rows do: 0.3 ms, where a row takes 5 µs.
What `penstock.sinks.nats.frames` makes is the same, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from penstock.core.message import DELETE
from penstock.core.subject import MAX_SUBJECT_BYTES

MAX_HEADER: Final = 65_535
"""The bytes of a message's headers, its id among them, that JetStream takes."""
FEW: Final = 64
FEW_BYTES: Final = 1 << 20
_DELETE: Final = DELETE.encode()
_NAMES: Final = ("record", "changes", "action", "metadata", "idempotency_key")


@dataclass(frozen=True, slots=True)
class FewFrames:
    """Frames, the size of each one's headers and body, and the bytes of all bodies."""

    frames: list[bytes]
    payload: list[int]
    body_bytes: int


@dataclass(frozen=True, slots=True)
class FewEncoder:
    """Makes the frames of a few rows.

    Attributes:
        reply: The reply subject up to the row's number, with the space before it.
        header: From the end of HPUB's line up to the key.
        after_metadata: From the last member of the metadata on.
        has_changes: Whether a message has `changes` and `action`.
        member: What a message begins with: its brace, and the name of its record or event.
    """

    reply: bytes
    header: bytes
    after_metadata: bytes
    has_changes: bool
    member: bytes

    def __call__(
        self, part: pa.RecordBatch, subjects: Sequence[bytes], base: int
    ) -> FewFrames | None:
        """Return the frames of `part`, the first row of which has the number `base`.

        None where a row may be one to refuse, has unusual metadata, or is large.
        """
        frames, payloads, body_bytes = [], [], 0
        columns = (_values(part, name) for name in _NAMES)
        rows = zip(subjects, *columns, strict=True)
        for number, (subject, record, changes, action, metadata, key) in enumerate(rows, base):
            size = len(self.header) + len(key) + 2
            if (
                body_bytes > FEW_BYTES
                or metadata[-1:] != b"}"
                or len(metadata) < 3
                or size > MAX_HEADER
                or len(subject) > MAX_SUBJECT_BYTES
                or b"\r" in key
                or b"\n" in key
            ):
                return None
            if self.has_changes:
                what = b'%b,"changes":%b,"action":"%b"' % (record, changes, action)
            else:
                what = record + b',"action":"delete"' if action == _DELETE else record
            body = b'%b%b,"metadata":%b%b' % (
                self.member, what, metadata[:-1], self.after_metadata,
            )  # fmt: skip
            payload = size + len(body) - 2  # without the line end behind it
            frames.append(
                b"HPUB %b%b%d %d %d%b%b\r\n\r\n%b"
                % (subject, self.reply, number, size, payload, self.header, key, body)
            )
            payloads.append(payload)
            body_bytes += payload - size
        return FewFrames(frames, payloads, body_bytes)


def _values(batch: pa.RecordBatch, name: str) -> list[bytes]:
    """Return a column's texts as bytes; in the place of null what stands for it."""
    null = b"{}" if name == "metadata" else b"null"
    values = batch.column(name).to_pylist()
    return [null if v is None else v.encode() if isinstance(v, str) else v for v in values]
