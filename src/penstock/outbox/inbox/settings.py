"""The settings of a pipeline into an inbox."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.nats import NatsSinkConfig
from penstock.core.errors import PipelineError
from penstock.core.text import dotted
from penstock.outbox.secrets import UnresolvedError, resolve
from penstock.outbox.settings import read, without_nulls


@dataclass(frozen=True)
class InboxSettings:
    """What a pipeline into an inbox reads, with its references resolved."""

    nats: NatsSinkConfig
    stream: str | None
    subject: str | None
    durable: str
    batch_size: int
    from_end: bool


def read_settings(
    config: Mapping[str, Any], durable: str, environ: Mapping[str, str]
) -> InboxSettings:
    """Return the settings of a config of `tide.relay_set_inbox`; raises `PipelineError`.

    `durable` is the default of the consumer's name; `environ` gives `${env:NAME}`.
    """
    own = ("source_type", "subject", "durable")
    config = without_nulls(config)
    given = {key: value for key, value in config.items() if key not in own}
    try:
        shared = read({"sink_type": config.get("source_type"), **given}, environ)
        texts = resolve({key: config[key] for key in own[1:] if key in config}, environ)
    except UnresolvedError as error:
        raise PipelineError(
            "unresolved_reference", [f"{dotted(error.path)}: {error}"],
            "Correct it where the relay runs, or set the pipeline's config again.",
        ) from None  # fmt: skip
    except PipelineError as error:
        problems = [problem.replace("sink_type", "source_type") for problem in error.problems]
        remedy = error.remedy.replace("relay_set_outbox", "relay_set_inbox")
        raise PipelineError(error.code, problems, remedy) from None
    return InboxSettings(
        shared.sink(source="tide", outbox="inbox"), shared.stream, texts.get("subject"),
        texts.get("durable", durable), shared.batch_size, shared.start == "end",
    )  # fmt: skip


def durable_name(system: int, database: str, pipeline: str) -> str:
    """Return the name of a pipeline's consumer; it differs between databases that read one stream.

    `system` is Postgres' identifier of the cluster: databases of two clusters often share a name.
    """
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", f"tide_{database}_{pipeline}")
    name = f"{system}\0{database}\0{pipeline}".encode()
    return f"{plain}_{hashlib.blake2b(name, digest_size=4).hexdigest()}"
