"""The settings of consumers as they are written, and what a webhook's target gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.config.consumers import HttpConsumer, PullConsumer, WebhookConsumer
from penstock.config.targets import HttpTarget, joined_webhook
from penstock.config.yaml_lines import Document, filled
from penstock.core.text import dotted
from penstock.streams.consumers.types import Refused, WrongSetting

OF_TARGET: Final = frozenset({"target", "path", "url", "headers", "secrets"})
"""The keys of a webhook that its target has a part in."""


def written(keys: Mapping[str, Any]) -> HttpConsumer:
    """Return the consumer of type `pull` or `webhook` that has these keys; raises `ValidationError`."""
    model = WebhookConsumer if keys.get("type") == "webhook" else PullConsumer
    return model.model_validate(dict(keys))


def here(spec: Mapping[str, Any], kind: str, environ: Mapping[str, str]) -> HttpConsumer | None:
    """Return the consumer of an entity, None where it names variables that this process lacks.

    Raises `ValidationError`.
    """
    document = Document()
    keys = filled(spec, environ, (), document)
    return None if document.problems else written({**keys, "type": kind})


def joined(
    consumer: HttpConsumer, target: Mapping[str, Any] | None, environ: Mapping[str, str]
) -> HttpConsumer:
    """Return a consumer with what its target has; `target` is the spec of that, None without one.

    Raises `WrongSetting` where there is no such target of type http, and `Refused` for one that can't
    be used in this process.
    """
    if not isinstance(consumer, WebhookConsumer) or consumer.target is None:
        return consumer
    name = consumer.target
    if target is None:
        raise WrongSetting(f"there is no target {name!r}: make it first.", "target")
    if target.get("type") != "http":
        raise WrongSetting(
            f"{name!r} is of type {target.get('type')}, and a webhook needs http.", "target"
        )
    document = Document()
    value = filled(target, environ, (), document)
    why = [f"{dotted(path)}: {message}" for _, path, message in document.problems]
    if not why:
        try:
            return joined_webhook(consumer, name, HttpTarget.model_validate(value))
        except ValueError as error:  # of pydantic's too, which may show a secret
            why = ["its settings are wrong" if hasattr(error, "errors") else str(error)]
    raise Refused(f"Target {name!r} can't be used in this process: {'; '.join(why)}.")
