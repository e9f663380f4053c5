"""How far workers are: numbers in a file that they map and the benchmark reads while they work.

A worker writes 16 bytes after each ack: how many messages it has acked, and when it did.
"""

from __future__ import annotations

import mmap
import struct
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

_SLOT = struct.Struct("qq")
_STOP = _SLOT.size  # the slots begin behind the flag


class Mark(NamedTuple):
    """What a worker had acked, and the monotonic time (ns) of the last ack; 0 before the first."""

    acked: int
    at_ns: int


class Progress:
    """The file of a crew of workers; a context manager."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    @classmethod
    def create(cls, path: Path, workers: int) -> Self:
        """Make the file for so many workers."""
        path.write_bytes(bytes(_STOP + workers * _SLOT.size))
        return cls(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()

    @property
    def stopped(self) -> bool:
        """Whether the workers are to end."""
        return self._map[0] != 0

    def stop(self) -> None:
        """Have the workers end after the batch that they have."""
        self._map[0] = 1

    def mark(self, worker: int, acked: int) -> None:
        """Note that a worker has acked so many by now."""
        _SLOT.pack_into(self._map, _STOP + worker * _SLOT.size, acked, time.monotonic_ns())

    def marks(self) -> list[Mark]:
        """Return where all workers are."""
        return [Mark(*slot) for slot in _SLOT.iter_unpack(self._map[_STOP:])]


@dataclass(slots=True)
class Harvest:
    """What a worker received: the messages' numbers, and when and how many came at once."""

    ids: array[int]
    batches: array[int]  # monotonic ns and size, in turn

    @classmethod
    def empty(cls) -> Self:
        """Return one with nothing in it."""
        return cls(array("q"), array("q"))

    def add(self, ids: list[int]) -> None:
        """Note what came just now."""
        self.batches.extend((time.monotonic_ns(), len(ids)))
        self.ids.extend(ids)

    def write(self, path: Path) -> None:
        """Keep it in a file."""
        path.write_bytes(array("q", [len(self.batches)]).tobytes() + self.batches + self.ids)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what `write` kept."""
        numbers = array("q")
        numbers.frombytes(path.read_bytes())
        size = numbers[0] + 1
        return cls(numbers[size:], numbers[1:size])

    def arrivals(self) -> dict[int, int]:
        """Return when each message was there, in monotonic ns."""
        found: dict[int, int] = {}
        start = 0
        for at, size in zip(self.batches[::2], self.batches[1::2], strict=True):
            for number in self.ids[start : start + size]:
                found.setdefault(number, at)
            start += size
        return found


def rate(before: list[Mark], after: list[Mark]) -> float:
    """Return messages a second over all workers, each between its own two acks."""
    total = 0.0
    for first, last in zip(before, after, strict=True):
        if last.at_ns > first.at_ns > 0:
            total += (last.acked - first.acked) / ((last.at_ns - first.at_ns) / 1e9)
    return total


def acked(marks: list[Mark]) -> int:
    """Return how many messages all workers have acked."""
    return sum(mark.acked for mark in marks)
