"""Checks targets: whether a connection to each can be made, through its bastion if it has one."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.config.bastion import Bastion
from penstock.config.settings import Config
from penstock.config.sinks import NatsSinkSettings
from penstock.config.targets import NatsTarget, Target
from penstock.core.errors import TargetError
from penstock.core.finding import Finding
from penstock.push.reach import reach


def inspect_target(
    name: str, target: Target, config: Config, bastion: Bastion | None
) -> Iterator[Finding]:
    """Connect to a target behind `bastion`; a NATS target that has sinks is checked with these."""
    what = f"target {name}"
    is_nats = isinstance(target, NatsTarget)
    if is_nats and any(
        isinstance(sink, NatsSinkSettings) and sink.target == name for sink in config.sinks.values()
    ):
        return
    try:
        reached = reach(target, bastion, "penstock check")
    except TargetError as error:
        yield Finding("error", what, error.message, error.remedy)
        return
    through = "" if bastion is None else f", through bastion {bastion}"
    text = (
        f"reachable and logged in: {reached.address}"
        if is_nats
        else f"{reached.address} takes connections"
    )
    yield Finding("ok", what, f"{text}{through}")
