"""Bastions of targets and sources: the key to let in there, and the host key to trust."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from penstock.api.manage.context import Context
from penstock.api.manage.endpoints import AppContext, new_router
from penstock.api.manage.settings import source_of, target_of
from penstock.api.problems import Problem, documented, wrong
from penstock.api.requests import body_of, json_answer, read_object
from penstock.bastion import fingerprint, host_key, public_line
from penstock.config.bastion import Bastion, public_key
from penstock.core.errors import BastionError, TargetError
from penstock.desired.actions import Action
from penstock.streams.bastions import pin

BastionOf = Callable[[Context, str], Awaitable[Bastion | None]]

api = new_router()


class _Bastion(BaseModel):
    """The SSH server that a target or a source lies behind."""

    address: str
    public_key: str = Field(description="The line for the user's authorized_keys there.")
    host_key: str | None = Field(description="The one that is trusted; null: none is yet.")
    fingerprint: str | None
    pinned_by: Literal["configuration", "store"] | None = Field(
        description="What has the host key: the entity's own `host_key`, or a `PUT` of it."
    )


class _Shown(BaseModel):
    """The host key that a bastion has shown just now."""

    host_key: str
    fingerprint: str
    trusted: bool = Field(description="Whether it is the one that is trusted.")


class _Trusted(BaseModel):
    model_config = ConfigDict(extra="forbid")

    host_key: str = Field(description="Its type and its base64: `ssh-ed25519 AAAA…`.")
    replace: bool = Field(False, description="Also where another one is trusted already.")


async def _of_target(context: Context, text: str) -> Bastion | None:
    return (await target_of(context, text))[1]


async def _of_source(context: Context, text: str) -> Bastion | None:
    return (await source_of(context, text)).reached


def _add(kind: str, bastion_of: BastionOf) -> None:
    path = f"/v1/{kind}s/{{{kind}}}/bastion"
    named: dict[str, Any] = {
        "parameters": [
            {"name": kind, "in": "path", "required": True, "schema": {"type": "string"},
             "description": "Its name or its id."}
        ]
    }  # fmt: skip

    async def bastion(context: Context, request: Request) -> Bastion:
        text: str = request.path_params[kind]
        found = await bastion_of(context, text)
        if found is None:
            raise Problem(404, f"{kind.capitalize()} {text!r} has no bastion.")
        return found

    async def show(context: AppContext, request: Request) -> Response:
        found = await bastion(context, request)
        key = found.host_key
        by = None if key is None else "configuration" if found.pinned_in is None else "store"
        return json_answer(
            {
                "address": str(found),
                "public_key": _reported(public_line, found),
                "host_key": key,
                "fingerprint": None if key is None else _fingerprint(key),
                "pinned_by": by,
            }
        )

    api.add_api_route(
        path, show, response_model=_Bastion, summary=f"Show the bastion of a {kind}",
        operation_id=f"show_{kind}_bastion", openapi_extra=named, responses=documented(409, 424),
    )  # fmt: skip

    async def ask(context: AppContext, request: Request) -> Response:
        found = await bastion(context, request)
        key = await context.run_test(_reported, host_key, found)
        trusted = key == found.host_key
        return json_answer({"host_key": key, "fingerprint": _fingerprint(key), "trusted": trusted})

    api.add_api_route(
        f"{path}/host-key", ask, methods=["POST"], response_model=_Shown,
        summary=f"Ask the bastion of a {kind} for its host key",
        description="Compare the fingerprint with the bastion's own (`ssh-keygen -lf`) before it is "
        "trusted.",
        operation_id=f"ask_{kind}_bastion", openapi_extra=named, responses=documented(409, 424),
    )  # fmt: skip

    async def trust(context: AppContext, request: Request) -> Response:
        new = _Trusted.model_validate(await read_object(request))
        try:
            key = public_key(new.host_key)
        except ValueError as error:
            raise wrong("host_key", str(error)) from None
        _fingerprint(key)
        found = await bastion(context, request)
        if found.pinned_in is None:
            raise Problem(
                409,
                f"The configuration of {kind} {found.owner!r} has the host key: change it there.",
            )
        if found.host_key not in (None, key) and not new.replace:
            raise Problem(
                409,
                f"Another host key of bastion {found} is trusted already:"
                f" {_fingerprint(str(found.host_key))}. If the bastion was replaced on purpose, send"
                " `replace`.",
            )
        done = Action(kind, found.owner, "trust host key", {"fingerprint": _fingerprint(key)})
        await context.act(request, done, pin, context.store, found.owner, key)
        return await show(context, request)

    api.add_api_route(
        f"{path}/host-key", trust, methods=["PUT"], response_model=_Bastion,
        summary=f"Trust a host key of the bastion of a {kind}",
        operation_id=f"trust_{kind}_bastion", openapi_extra={**named, **body_of(_Trusted)},
        responses=documented(409, 413, 424),
    )  # fmt: skip


_add("target", _of_target)
_add("source", _of_source)


def _reported(call: Callable[[Bastion], str], bastion: Bastion) -> str:
    """Return what a call gives; its error is a target's, so that its status is one, too."""
    try:
        return call(bastion)
    except BastionError as error:
        raise TargetError(
            error.code, error.message, remedy=error.remedy, transient=error.transient
        ) from None


def _fingerprint(key: str) -> str:
    try:
        return fingerprint(key)
    except ValueError:
        raise wrong("host_key", f"a key of type {key.partition(' ')[0]} can't be read") from None
