"""Carries bytes between a socket of this process and a channel of SSH, both ways."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Protocol, cast

import asyncssh


class _Output(Protocol):
    def write(self, data: bytes) -> None: ...
    def write_eof(self) -> None: ...
    def close(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class _Side:
    """One end: what it reads goes to the other one, which pauses it while that can't write."""

    def __init__(self) -> None:
        self.output: _Output | None = None
        self.other: _Side | None = None
        self.ended = False

    def data_received(self, data: bytes, datatype: int | None = None) -> None:  # noqa: ARG002 - asyncssh's
        """Hand data on."""
        if self.other is not None and self.other.output is not None:
            with contextlib.suppress(OSError):  # it ends, which `connection_lost` reports
                self.other.output.write(data)

    def eof_received(self) -> bool:
        """Hand the end on; return whether the other direction stays open."""
        self.ended = True
        if self.other is None or self.other.output is None:
            return False
        with contextlib.suppress(OSError):
            self.other.output.write_eof()
        return not self.other.ended

    def pause_writing(self) -> None:
        """Have the other end read no more for now."""
        if self.other is not None and self.other.output is not None:
            self.other.output.pause_reading()

    def resume_writing(self) -> None:
        """Have the other end read again."""
        if self.other is not None and self.other.output is not None:
            self.other.output.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the other end shows it - asyncssh's
        """Close the other end."""
        self.output = None
        other, self.other = self.other, None
        if other is not None and other.output is not None:
            other.output.close()


class Local(_Side, asyncio.Protocol):
    """The socket's end; it reads nothing before `join`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the socket, and wait."""
        self.output = cast(asyncio.Transport, transport)
        self.output.pause_reading()

    def join(self, remote: Remote) -> None:
        """Carry bytes from now on."""
        self.other, remote.other = remote, self
        if self.output is not None:
            for data in remote.early:
                self.output.write(data)
        remote.early.clear()
        if self.output is None or remote.output is None:
            self.connection_lost(None)
            remote.connection_lost(None)
            return
        if remote.ended:
            self.output.write_eof()
        self.output.resume_reading()

    def abort(self) -> None:
        """Close the socket."""
        if self.output is not None:
            cast(asyncio.Transport, self.output).abort()


class Remote(_Side, asyncssh.SSHTCPSession[bytes]):
    """The channel's end. A server may send before the two are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.early: list[bytes] = []

    def connection_made(self, chan: Any) -> None:
        """Take the channel."""
        self.output = chan

    def data_received(self, data: bytes, datatype: int | None = None) -> None:
        """Hand data on, or keep it for the other end."""
        if self.other is None:
            self.early.append(data)
        else:
            super().data_received(data, datatype)

    def eof_received(self) -> bool:
        """Hand the end on, or keep it for the other end."""
        if self.other is None:
            self.ended = True
            return True
        return super().eof_received()
