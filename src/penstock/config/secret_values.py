"""Which values of an entity are secrets, and how they are shown.

What names a variable, `${DATABASE_URL}`, is no secret; what is written out beside it is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args

from pydantic import BaseModel, SecretStr

from penstock.config.explain import SECRET_KEY, inner_model
from penstock.config.models import model_of
from penstock.config.nats_consumers import NatsConsumer
from penstock.config.yaml_lines import replaced, without_variables
from penstock.core.redact import MASK, redact_url
from penstock.core.text import Path

_URL_KEYS: Final = ("url", "base_url", "access_token_url")
_PLAIN_KEYS: Final = ("default_token_expiration",)
_PLACEHOLDER: Final = re.compile(r"\{[A-Za-z_][A-Za-z0-9_.]*\}")
"""What stands for a property of a credential in a provider's texts."""
_QUERY: Final = re.compile(r"\?.*", re.DOTALL)


def secrets(kind: str, spec: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield the path and the value of each secret that is written out in an entity's `spec`."""
    for path, value, _ in _secrets(spec, model_of(kind, spec), kind, ()):
        yield path, value


def masked(kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return `spec` as it may be shown: of a secret URL its address, of other secrets nothing."""
    found = {path: shown for path, _, shown in _secrets(spec, model_of(kind, spec), kind, ())}
    result: dict[str, Any] = replaced(spec, found)
    return result


def _secrets(
    spec: Mapping[str, Any], model: type[BaseModel] | None, kind: str, path: Path
) -> Iterator[tuple[Path, str, str]]:
    for key, value in spec.items():
        is_text = isinstance(value, str)
        if key in _URL_KEYS and is_text:
            of_webhook = kind == "consumer" and model is not NatsConsumer
            if (shown := _shown_url(value, of_webhook=of_webhook)) != value:
                yield (*path, key), value, shown
        elif _is_secret(model, key):
            yield from _all_texts(value, (*path, key), of_provider=kind == "provider")
        elif is_text or isinstance(value, int):
            continue
        elif isinstance(value, Mapping):
            inner = inner_model(_annotation(model, key), value)
            yield from _secrets(value, inner, kind, (*path, key))
        elif isinstance(value, list | tuple):
            for i, member in enumerate(value):
                if isinstance(member, Mapping):
                    inner = inner_model(_annotation(model, key), member)
                    yield from _secrets(member, inner, kind, (*path, key, i))


@functools.lru_cache(maxsize=1024)
def _is_secret(model: type[BaseModel] | None, key: str) -> bool:
    """Whether what stands at a key of a model is a secret, by the key's name or by its type."""
    named = SECRET_KEY.search(key) is not None and key not in _PLAIN_KEYS
    return named or _mentions(_annotation(model, key))


def _annotation(model: type[BaseModel] | None, key: str) -> Any:
    field = None if model is None else model.model_fields.get(key)
    return None if field is None else field.annotation


def _all_texts(value: Any, path: Path, *, of_provider: bool) -> Iterator[tuple[Path, str, str]]:
    if isinstance(value, str):
        bare = without_variables(value)
        if _PLACEHOLDER.sub("", bare) if of_provider else bare:
            yield path, value, MASK
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from _all_texts(member, (*path, key), of_provider=of_provider)
    elif isinstance(value, list | tuple):
        for i, member in enumerate(value):
            yield from _all_texts(member, (*path, i), of_provider=of_provider)
    elif value is not None and not isinstance(value, bool):
        yield path, str(value), MASK


def _shown_url(url: str, *, of_webhook: bool) -> str:
    """Return a URL without its secrets; the URL itself where it has none beside its variables."""
    bare = without_variables(url)
    if of_webhook:
        # Neither its login nor its query is shown anywhere.
        plain = _QUERY.sub("", bare)
        scheme, separator, rest = plain.partition("://")
        host, slash, tail = rest.partition("/")
        shown = f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{tail}"
        return url if shown == bare else shown
    shown = redact_url(bare)
    return url if shown.replace(MASK, "") == bare else shown


def _mentions(annotation: Any) -> bool:
    """Whether a type has a `SecretStr` in it."""
    return annotation is SecretStr or any(_mentions(part) for part in get_args(annotation))
