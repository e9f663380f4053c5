"""The process that runs a manifest: a program for the environment that has airbyte-cdk.

Of Penstock it imports files beside this one alone: `channel`, `transport`, `stream_reader`, `logins` and
`async_jobs`. It makes no connection: requests, and waits between them, are messages to Penstock, so that
its budget, time-outs and rules about addresses hold for them.

Names of airbyte-cdk that begin with `_` are used in this program alone; the lock pins its version.
"""

import functools
import pathlib
import pickle
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any, Final

for _name in ("penstock", "penstock.syncs", "penstock.syncs.airbyte"):
    # The files beside this one are imported as Penstock's, of which nothing is on the path.
    _package = sys.modules[_name] = types.ModuleType(_name)
    _package.__path__ = []
_package.__path__ = [str(pathlib.Path(__file__).parent)]

from penstock.syncs.airbyte.channel import CHANNEL, StoppedError  # noqa: E402, I001 - airbyte-cdk takes its `time.sleep`

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
from jsonschema import ValidationError, validators  # noqa: E402 - as above

from penstock.syncs.airbyte import async_jobs, logins, transport  # noqa: E402 - as above
from penstock.syncs.airbyte.stream_reader import StreamReader, words  # noqa: E402 - as above

_MOST_MANIFESTS: Final = 16


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


transport.install()
JsonFileSchemaLoader.get_json_schema = _no_schema
# Components of the catalogue have one as a dataclass's default, which Python allows for these alone.
JsonDecoder.__hash__ = object.__hash__  # type: ignore[method-assign,unused-ignore]  # as above
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
    state = None
    name, since = order["stream"], order["from"]
    if since is not None:
        blob = AirbyteStateBlob({order["cursor_field"]: since})
        of = AirbyteStreamState(StreamDescriptor(name=name), blob)
        state = [AirbyteStateMessage(type=AirbyteStateType.STREAM, stream=of)]
    stream = _source(order, state).stream(name)
    reader = StreamReader(stream, order, lambda page: CHANNEL.ask("page", **page))
    transport.before_requests(reader.flush)
    try:
        return reader.read()
    finally:
        transport.before_requests(None)


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
        except StoppedError:
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
