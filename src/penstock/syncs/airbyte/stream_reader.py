"""Reads one stream of a manifest: a part of `worker`."""

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

_PAGE: Final = 500
_UTC: Final = datetime.UTC
_BLANKS: Final = re.compile(r"\s+")


class StreamReader:
    """Reads one stream, and sends its records page by page."""

    def __init__(
        self, stream: Any, order: dict[str, Any], send: Callable[[dict[str, Any]], object]
    ) -> None:
        self._send = send
        self._stream = stream
        self._done: list[str] = list(order["done"])
        self._until = datetime.datetime.fromisoformat(order["until"])
        self._overlap = datetime.timedelta(seconds=order["overlap"])
        self._records: list[Any] = []
        self._times: list[str | None] = []
        self._bad: list[tuple[int, str]] = []
        self._newest: Any = None
        cursor = stream.cursor
        self._cursor = cursor if hasattr(cursor, "_connector_state_converter") else None
        self._converter: Any = getattr(cursor, "_connector_state_converter", None)
        if self._converter is not None:
            for text in (order["since"], order["newest"]):
                if text is not None:
                    self._note(self._converter.parse_value(text))

    def read(self) -> dict[str, Any]:
        """Send all pages; return the cursor up to which that is everything."""
        known = set(self._done)
        parts = getattr(self._stream, "_stream_partition_generator", None)
        jobs: Any = getattr(parts, "_stream_slicer", None)
        has_jobs = hasattr(jobs, "job_orchestrator_factory")
        if has_jobs:
            jobs.stream_slicer = _Left(jobs.stream_slicer, known)
        for partition in self._stream.generate_partitions():
            name = _name_of(partition.to_slice())
            if name in known:
                continue
            for record in partition.read():
                self._take(record)
                if len(self._records) >= _PAGE:
                    self.flush()
            if not has_jobs:
                self.flush()
            # What a later slice brings is asked for again from here.
            self._done.append(name)
            if has_jobs:
                # The next job may take an hour: where it breaks off, this one is not done again.
                self._send_page()
        return {"cursor": self._state()}

    def flush(self) -> None:
        """Send what was read; it is called before each request too, so that no record waits for one."""
        if self._records:
            self._send_page()

    def _send_page(self) -> None:
        page = {
            "records": self._records,
            "times": self._times,
            "bad": self._bad,
            "done": list(self._done),
            "newest": None if self._newest is None else self._text(self._newest),
        }
        self._records, self._times, self._bad = [], [], []
        self._send(page)

    def _take(self, record: Any) -> None:
        self._records.append(record.data)
        self._times.append(None)
        if self._cursor is None:
            return
        try:
            value = self._cursor.cursor_field.extract_value(record)
        except (ValueError, KeyError, TypeError):
            return
        try:
            value = self._converter.parse_value(value)
            if isinstance(value, datetime.datetime):
                self._times[-1] = value.astimezone(_UTC).isoformat()
                value = value.astimezone(_UTC)
            else:
                self._times[-1] = str(value)
            self._note(value)
        except Exception as error:  # a parser is anybody's code
            self._times[-1] = None
            self._bad.append((len(self._records) - 1, f"its cursor can't be read: {words(error)}"))

    def _note(self, value: Any) -> None:
        if self._newest is None or value > self._newest:
            self._newest = value

    def _text(self, value: Any) -> Any:
        return self._converter.output_format(value)

    def _state(self) -> dict[str, Any] | None:
        """Return up to where the stream is read, never past the time at which that began."""
        if self._newest is None:
            return None
        if not isinstance(self._newest, datetime.datetime):
            return {"value": self._newest, "from": self._newest}
        value = min(self._newest, self._until)
        try:
            begin = value - self._overlap
        except OverflowError:
            begin = value
        return {"value": self._text(value), "from": self._text(begin)}


class _Left:
    """The slices of a stream that are not done yet: no job is made for others."""

    def __init__(self, slicer: Any, done: set[str]) -> None:
        self._slicer = slicer
        self._done = done

    def stream_slices(self) -> Iterator[Any]:
        for slice_ in self._slicer.stream_slices():
            if _name_of(slice_) not in self._done:
                yield slice_


def _name_of(slice_: Any) -> str:
    """Return a short name of a slice, the same each time."""
    text = json.dumps(dict(slice_ or {}), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=9).hexdigest()


def words(error: BaseException) -> str:
    """Return the text of an error, on one line."""
    text = getattr(error, "message", None) or str(error) or type(error).__name__
    if isinstance(error, KeyError):
        text = f"there is no {text}"
    return _BLANKS.sub(" ", str(text))[:600]
