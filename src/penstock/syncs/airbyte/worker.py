"""The process that runs a manifest: a program for the environment that has airbyte-cdk.

It imports nothing of Penstock, and talks in lines of JSON: an order comes in, messages go out, and each
of these but the last has an answer. It makes no connection: requests, and waits between them, are
messages too, so that Penstock's budget, time-outs and rules about addresses hold for them.

Names of airbyte-cdk that begin with `_` are used here alone; the lock pins its version.
"""

import base64
import functools
import importlib.util
import io
import json
import os
import pathlib
import pickle
import queue
import shutil
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator
from email.message import Message
from typing import TYPE_CHECKING, Any, Final, NoReturn

_OUT: Final = os.fdopen(os.dup(1), "wb", buffering=0)
os.dup2(2, 1)  # what the manifest's code prints is no message
_FOLDER: Final = sys.argv[1]
os.chdir(_FOLDER)  # airbyte-cdk puts downloads into files of the working directory


def _beside(name: str) -> types.ModuleType:
    """Return another part of this program: nothing of Penstock's packages is on the path."""
    spec = importlib.util.spec_from_file_location(
        name, pathlib.Path(__file__).with_name(f"{name}.py")
    )
    assert spec is not None  # noqa: S101 - the file is there
    assert spec.loader is not None  # noqa: S101 - as above
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


if TYPE_CHECKING:
    from penstock.syncs.airbyte.stream_reader import StreamReader, words
else:
    _found = _beside("stream_reader")
    StreamReader, words = _found.StreamReader, _found.words


class _StoppedError(BaseException):
    """The order is given up; no `except Exception` of a library keeps it."""


class _Channel:
    """What passes between Penstock and this process; the main thread alone talks."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        # Of `sys.stdin` it would hold the lock that the interpreter wants when it ends.
        parts: list[bytes] = []
        while data := os.read(0, 1 << 20):
            *ends, rest = data.split(b"\n")
            for end in ends:
                self._lines.put(b"".join((*parts, end)))
                parts.clear()
            parts.append(rest)
        shutil.rmtree(_FOLDER, ignore_errors=True)
        os._exit(0)  # whatever the main thread does: it is not waited for

    def order(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._lines.get())
        return found

    def send(self, do: str, **fields: Any) -> None:
        _OUT.write(_encoded({"do": do, **fields}) + b"\n")

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        self.send(do, **fields)
        answer = self.order()
        if answer.get("stop"):
            raise _StoppedError
        return answer


def _encoded(message: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(message, default=str)
    except TypeError:  # whole numbers of more than 64 bits
        return json.dumps(message, default=str, ensure_ascii=False).encode("utf-8", "replace")


CHANNEL: Final = _Channel()
_MAIN: Final = threading.main_thread()
_sleep: Final = time.sleep


def _wait(seconds: float) -> None:
    if threading.current_thread() is _MAIN:
        CHANNEL.ask("wait", seconds=float(seconds))
    else:
        _sleep(seconds)


time.sleep = _wait  # type: ignore[assignment]  # for all of the process

import orjson  # noqa: E402 - airbyte-cdk takes `time.sleep` at its import
import requests  # noqa: E402 - as above
import yaml  # noqa: E402 - as above
from airbyte_cdk.models import (  # noqa: E402 - as above
    AirbyteStateBlob,
    AirbyteStateMessage,
    AirbyteStateType,
    AirbyteStreamState,
    Status,
    StreamDescriptor,
)
from airbyte_cdk.sources.declarative import (  # noqa: E402 - as above
    concurrent_declarative_source as sources,
)
from airbyte_cdk.sources.declarative.decoders import JsonDecoder  # noqa: E402 - as above
from airbyte_cdk.sources.declarative.parsers.model_to_component_factory import (  # noqa: E402 - as above
    ModelToComponentFactory,
)
from airbyte_cdk.sources.declarative.schema import JsonFileSchemaLoader  # noqa: E402 - as above
from airbyte_cdk.sources.streams.call_rate import LimiterSession  # noqa: E402 - as above
from airbyte_cdk.sources.streams.http import HttpClient  # noqa: E402 - as above
from jsonschema import ValidationError, validators  # noqa: E402 - as above
from urllib3.response import HTTPResponse  # noqa: E402 - as above

if TYPE_CHECKING:
    from penstock.syncs.airbyte import async_jobs, logins
else:
    async_jobs = _beside("async_jobs")
    logins = _beside("logins")

_DECODED: Final = ("content-encoding", "content-length", "transfer-encoding")
_UNAUTHORIZED: Final = 401
_MOST_MANIFESTS: Final = 16


_reader: StreamReader | None = None


def _transmit(_self: Any, request: requests.PreparedRequest, **_kwargs: Any) -> requests.Response:
    """Have Penstock make a request: in the place of `HTTPAdapter.send`."""
    if threading.current_thread() is not _MAIN:
        raise requests.exceptions.ConnectionError("requests of other threads are not made")
    if _reader is not None:
        _reader.flush()
    body = request.body
    if body is not None and not isinstance(body, str | bytes):
        body = body.read() if hasattr(body, "read") else b"".join(body)
    sent = None if body is None else _b64(body.encode() if isinstance(body, str) else body)
    answer = _answer(request, sent)
    if answer.get("status") == _UNAUTHORIZED and (
        login := logins.another(request.headers.get("Authorization", ""))
    ):
        request.headers["Authorization"] = login
        answer = _answer(request, sent)
    if async_jobs.is_ending() and answer.get("status", 400) >= 400:
        raise OSError("a job can't be aborted")  # one try is enough
    if "failed" in answer:
        raise requests.exceptions.ConnectionError(answer["failed"], request=request)
    headers = Message()
    for name, value in answer["headers"]:
        if name.lower() not in _DECODED:
            headers[name] = value
    raw = HTTPResponse(
        body=io.BytesIO(base64.b64decode(answer["body"])),
        headers=dict(headers.items()),
        status=answer["status"],
        reason=answer["reason"],
        preload_content=False,
    )
    # Cookies are read from here.
    cookies: Any = raw
    cookies._original_response = types.SimpleNamespace(
        msg=headers, isclosed=lambda: True, close=lambda: None
    )
    return requests.adapters.HTTPAdapter.build_response(_self, request, raw)


def _answer(request: requests.PreparedRequest, body: str | None) -> dict[str, Any]:
    return CHANNEL.ask(
        "send", method=request.method, url=request.url, headers=dict(request.headers), body=body,
        ending=async_jobs.is_ending(),
    )  # fmt: skip


def _ask(do: str, **fields: Any) -> dict[str, Any]:
    if _reader is not None:
        _reader.flush()
    return CHANNEL.ask(do, **fields)


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _no_connection(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise OSError("this process makes no connection: requests go through the library requests")


def _uncached(self: Any) -> Any:
    # Its cache lives for an hour, as long as the process: a parent that is new would not be seen.
    return LimiterSession(api_budget=self._api_budget)


def _no_schema(_self: Any) -> dict[str, Any]:
    # It is a file of the connector's package. Objects stay as the API has them without it; what
    # components ask for may depend on it.
    if _is_of_components(sys._getframe(1)):
        raise OSError("a schema is read that is a file of the connector's package, and is not here")
    return {"type": "object", "properties": {}}


_components: types.ModuleType | None = None


def _is_of_components(frame: types.FrameType) -> bool:
    return _components is not None and frame.f_code.co_filename == _components.__file__


def _own_class(name: str) -> Any:
    """Return a class of the file of components alone: a manifest must not name any other code."""
    if _components is None:
        raise ValueError(f"its component {name} is Python of its own, and no file has that")
    found = getattr(_components, name.rpartition(".")[2], None)
    if found is None:
        raise ValueError(f"the file of components has no class {name.rpartition('.')[2]}")
    return found


requests.adapters.HTTPAdapter.send = _transmit  # type: ignore[method-assign,assignment]  # as above
socket.socket.connect = _no_connection  # type: ignore[method-assign]  # as above
socket.socket.connect_ex = _no_connection  # type: ignore[method-assign]  # as above
HttpClient._request_session = _uncached
JsonFileSchemaLoader.get_json_schema = _no_schema
# Components of the catalogue have one as a dataclass's default, which Python allows for these alone.
JsonDecoder.__hash__ = object.__hash__  # type: ignore[method-assign,unused-ignore]  # as above
logins.install(_ask)
async_jobs.install()
ModelToComponentFactory._get_class_from_fully_qualified_class_name = staticmethod(_own_class)


sources.get_declarative_component_schema = functools.cache(sources.get_declarative_component_schema)


class _Source(sources.ConcurrentDeclarativeSource):  # type: ignore[misc,unused-ignore]  # as above
    """A source whose manifest is resolved and validated once: a large one takes seconds of CPU."""

    _kept: Final[dict[str, tuple[bytes, list[Any]]]] = {}

    def __init__(self, text: str, config: dict[str, Any], state: list[Any] | None) -> None:
        self._text = text
        if text in self._kept:
            pickled, self._updaters = self._kept[text]
            manifest = pickle.loads(pickled)  # noqa: S301 - it is from here
        else:
            manifest = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe loaders
            self._updaters = list(_values(manifest, "refresh_token_updater"))
        logins.begin(self._updaters, config)
        super().__init__(config=config, catalog=None, state=state, source_config=manifest)

    def _pre_process_manifest(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if self._text in self._kept:
            return manifest
        resolved: dict[str, Any] = super()._pre_process_manifest(manifest)
        return resolved

    def _validate_source(self) -> None:
        if self._text in self._kept:
            return
        super()._validate_source()
        if len(self._kept) >= _MOST_MANIFESTS:
            self._kept.clear()
        self._kept[self._text] = pickle.dumps(self._source_config), self._updaters

    def stream(self, name: str) -> Any:
        """Return a stream by its name; those that the API names are asked for only where it is one."""
        found = self._streams_by_name([name]) or self.streams(config=self._config)
        streams = {each.name: each for each in found}
        if name not in streams:
            raise _RefusedError(
                "not_found",
                f"The manifest has no stream {name!r}; it has: {', '.join(sorted(streams))}.",
                "Correct the sync's collections.",
            )
        return streams[name]


class _RefusedError(Exception):
    """An order can't be done; `code` is that of Penstock's error."""

    def __init__(self, code: str, text: str, remedy: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.remedy = remedy


def _source(order: dict[str, Any], state: list[Any] | None = None) -> _Source:
    global _components
    _components = None
    if order["components"] is not None:
        _components = types.ModuleType("components")
        sys.modules["components"] = sys.modules["source_declarative_manifest.components"] = (
            _components
        )
        code, file = order["components"]
        _components.__file__ = file
        exec(compile(code, file, "exec"), _components.__dict__)  # noqa: S102 - the user's own
    config = order["config"]
    try:
        source = _Source(order["manifest"], config, state)
    except ValidationError as error:
        if not isinstance(error.__cause__, ValidationError):
            raise
        reason = _innermost(error.__cause__)
        where = ".".join(map(str, reason.absolute_path))
        raise ValueError(f"{where}: {words(reason)}") from None
    _check_config(source, config)
    return source


def _innermost(error: ValidationError) -> ValidationError:
    """Return what is wrong with a component of the type that it names, not with all that it could be."""
    while error.context:
        forms: dict[Any, list[ValidationError]] = {}
        for each in error.context:
            forms.setdefault(each.relative_schema_path[0], []).append(each)
        meant = [
            form for form in forms.values() if all(list(e.relative_path) != ["type"] for e in form)
        ]
        if not meant:
            break
        error = max((e for form in meant for e in form), key=lambda e: len(e.absolute_path))
    return error


def _check_config(source: Any, config: dict[str, Any]) -> None:
    schema = (source.resolved_manifest.get("spec") or {}).get("connection_specification") or {}
    for error in validators.validator_for(schema)(schema).iter_errors(config):
        where = ".".join(map(str, error.absolute_path))
        if error.validator == "required":
            missing = [n for n in error.validator_value if n not in (error.instance or {})]
            text = f"lacks {', '.join(f'{where}.{n}' if where else n for n in missing)}"
        else:  # its own text has the value, which may be a secret
            text = f"has {where or 'keys'} that its {error.validator} does not allow"
        raise _RefusedError(
            "credential",
            f"The manifest's configuration {text}.",
            "Give it under config: of the provider, or as a property of the credential.",
        )


def _values(value: Any, key: str) -> Iterator[Any]:
    """Yield what stands under a key, however deep that is."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _values(each, key)


def _discover(order: dict[str, Any]) -> dict[str, Any]:
    found = []
    source = _source(order)
    for stream in source.streams(config=source._config):
        described = stream.as_airbyte_stream()
        key = described.source_defined_primary_key or []
        cursor = (described.default_cursor_field or [None])[0]
        found.append([described.name, [".".join(path) for path in key], cursor])
    return {"streams": found}


def _check(order: dict[str, Any]) -> dict[str, Any]:
    source = _source(order)
    try:
        status = source.check(source.logger, source._config)
    except async_jobs.CreatedError:
        return {}
    if status.status is not Status.SUCCEEDED:
        raise RuntimeError(str(status.message))
    return {}


def _read(order: dict[str, Any]) -> dict[str, Any]:
    global _reader
    state = None
    name, since = order["stream"], order["from"]
    if since is not None:
        blob = AirbyteStateBlob({order["cursor_field"]: since})
        of = AirbyteStreamState(StreamDescriptor(name=name), blob)
        state = [AirbyteStateMessage(type=AirbyteStateType.STREAM, stream=of)]
    stream = _source(order, state).stream(name)
    _reader = StreamReader(stream, order, lambda page: CHANNEL.ask("page", **page))
    try:
        return _reader.read()
    finally:
        _reader = None


def _whole(error: BaseException) -> str:
    """Return why an order has failed, with the causes that its errors hide."""
    texts: list[str] = []
    at: BaseException | None = error
    while at is not None and len(texts) < 3:
        text = words(at)
        if text not in texts:
            texts.append(text)
        last, at = at, at.__cause__
    found = ": ".join(texts)
    lines = [
        line for frame, line in traceback.walk_tb(last.__traceback__) if _is_of_components(frame)
    ]
    return f"{found} (line {lines[-1]} of the components)" if lines else found


_ORDERS: Final = {"discover": _discover, "check": _check, "read": _read}


def main() -> None:
    """Do orders until there are no more."""
    import logging  # noqa: PLC0415 - it is off from here on

    logging.disable(logging.CRITICAL)  # its lines hold requests, and what logs in
    CHANNEL.send("ready")
    while True:
        order = CHANNEL.order()
        try:
            async_jobs.begin(is_check=order["do"] == "check")
            result = _ORDERS[order["do"]](order)
            CHANNEL.send("end", **result)
        except _StoppedError:
            CHANNEL.send("stopped")
        except logins.NoTokenError as error:
            CHANNEL.send("no_token", text=_whole(error.__cause__ or error))
        except _RefusedError as error:
            CHANNEL.send("refused", code=error.code, text=str(error), remedy=error.remedy)
        except Exception as error:  # whatever the manifest's code raises
            text = _whole(error)
            if (of_jobs := async_jobs.failure(text)) is None:
                CHANNEL.send("failed", text=text)
            else:
                code, text, remedy = of_jobs
                CHANNEL.send("jobs_failed", code=code, text=text, remedy=remedy)


if __name__ == "__main__":
    main()
