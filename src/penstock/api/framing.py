"""How far what a client sends may be parsed: to the end of a head or a body, within their limits.

No I/O and no clock. What breaks a limit raises a `Problem`.
"""

from __future__ import annotations

from typing import Final

from penstock.api.problems import Problem

MAX_HEAD: Final = 1 << 16  # bytes of request line and headers
MAX_HEADERS: Final = 100
MAX_BODY: Final = 1 << 20  # bytes
_END: Final = b"\r\n\r\n"


class Framing:
    """Where the head and the body of one request after another end."""

    def __init__(self) -> None:
        self.head = 0  # bytes of this head so far
        self._headers = 0
        self._tail = b""  # the last bytes fed, which the end of a head or a chunk may begin in
        self._left = 0  # bytes of this body to come, where its length is known
        self._chunked = False
        self._size = self._framed = 0  # bytes of this chunked body so far, and with its framing

    def next_request(self) -> None:
        """Expect a head."""
        self.head, self._tail = 0, b""
        self._headers = self._left = self._size = self._framed = 0
        self._chunked = False

    def note_header(self, name: bytes, value: bytes) -> None:
        """Note a header of the head."""
        name = name.lower()
        if name == b"content-length":
            self._left = int(value)
        elif name == b"transfer-encoding":
            self._chunked = True
        self._headers += 1
        if self._headers > MAX_HEADERS:
            raise Problem(431, f"There are more than {MAX_HEADERS} headers.")

    def end_head(self) -> None:
        """Note that the headers are complete."""
        if self._left > MAX_BODY:
            raise _too_large()

    def note_body(self, part: bytes) -> None:
        """Note a part of the body."""
        if self._chunked:
            self._size += len(part)
            if self._size > MAX_BODY:
                raise _too_large()

    @property
    def has_body(self) -> bool:
        """Whether a body follows the head."""
        return self._left > 0 or self._chunked

    def head_end(self, data: bytes, at: int) -> int:
        """Return how far `data` may be parsed: no further than the end of the head."""
        end = self._find_end(data, at)
        self.head += end - at
        if self.head > MAX_HEAD:
            raise Problem(431, f"The request line and the headers are more than {MAX_HEAD} bytes.")
        return end

    def body_end(self, data: bytes, at: int) -> int:
        """Return how far `data` may be parsed: no further than the end of the body."""
        if self._left:
            end = min(at + self._left, len(data))
            self._left -= end - at
            return end
        end = self._find_end(data, at)
        self._framed += end - at
        if self._framed > 2 * MAX_BODY:
            raise _too_large()
        return end

    def _find_end(self, data: bytes, at: int) -> int:
        """Return where the first empty line after `at` ends, or the length of `data`."""
        if self._tail:
            found = (self._tail + data[at : at + 3]).find(_END)
            if found >= 0:
                end = at + found + 4 - len(self._tail)
                self._tail = b""
                return end
        found = data.find(_END, at)
        if found >= 0:
            self._tail = b""
            return found + 4
        self._tail = (self._tail + data[max(at, len(data) - 3) :])[-3:]
        return len(data)


def _too_large() -> Problem:
    return Problem(413, f"The body is larger than {MAX_BODY} bytes: send fewer at a time.")
