"""`/v1/dead-letters`: what sinks and consumers could not deliver; list, replay, drop."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from fastapi import Path, Query, Request
from fastapi.responses import Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from penstock.api.manage.context import Context, actor_of
from penstock.api.manage.endpoints import AppContext, new_router
from penstock.api.manage.pages import Paged, after, following, paged
from penstock.api.manage.settings import name_of, pipelines_of
from penstock.api.problems import Problem, documented, problem_of, wrong
from penstock.api.requests import SUCCESS, Json, body_of, json_answer, read_object
from penstock.api.schemas import Page, Success
from penstock.config.consumers import storable
from penstock.config.settings import Config
from penstock.config.strict import DIGITS, Flag, Whole
from penstock.core.errors import PenstockError
from penstock.desired.actions import Action, note_action, of_letters
from penstock.streams.connection import Also
from penstock.streams.letters import Cause
from penstock.streams.records import StoredLetter

_LETTERS: Final = "/v1/dead-letters"
_MAX_ID: Final = 2**63 - 1
_AT_ONCE: Final = 100

_Id = Annotated[int, Path(alias="id", ge=1, le=_MAX_ID), DIGITS]
_Text = Annotated[str, Field(min_length=1, max_length=1_000), AfterValidator(storable)]

api = new_router()


class _Query(Paged):
    sink: str | None = Field(None, description="Those of this sink, by name or id.")
    consumer: str | None = Field(None, description="Those of this consumer, by name or id.")
    code: _Text | None = Field(None, description="Those of this cause, as `max_deliver`.")
    text: _Text | None = Field(
        None, description="Those with this in their reason, message, key or subject."
    )
    replayed: bool | None = Field(None, description="Those that were replayed, or were not.")
    idempotency_key: _Text | None = Field(None, description="Those of the message with this key.")


class _Listed(_Query):
    order: Literal["oldest", "newest"] = Field("oldest", description="Which ones come first.")


class _Letter(BaseModel):
    id: int
    sink: str | None
    consumer: str | None
    idempotency_key: str | None
    subject: str | None
    code: str
    reason: str
    deliver_count: int | None
    at: datetime
    replayed_at: datetime | None


class _WholeLetter(_Letter):
    """A dead letter with its message: what was to be sent, or what was captured."""

    message: str


class _LettersPage(Page):
    """Dead letters without their messages."""

    data: list[_Letter]


class _Cause(BaseModel):
    """The dead letters of a sink or a consumer that have one cause."""

    sink: str | None
    consumer: str | None
    code: str
    waiting: int = Field(description="Those that were not replayed.")
    replayed: int
    first_at: datetime
    last_at: datetime
    last_id: int
    reason: str = Field(description="That of the newest.")


class _Causes(Page):
    """Causes by sink and consumer."""

    data: list[_Cause]


class _Selection(BaseModel):
    model_config = ConfigDict(extra="forbid")

    ids: (
        Annotated[
            list[Annotated[Whole, Field(ge=1, le=_MAX_ID)]],
            Field(min_length=1, max_length=_AT_ONCE),
        ]
        | None
    ) = None
    sink: str | None = None
    consumer: str | None = None
    code: _Text | None = Field(None, description="Of these, those of one cause.")
    text: _Text | None = Field(
        None, description="Of these, those with it in their reason, message, key or subject."
    )
    through: Annotated[Whole, Field(ge=1, le=_MAX_ID)] | None = Field(
        None, description="Up to this id: what has come since it was looked at stays."
    )

    def check(self) -> None:
        """Raise `Problem` where nothing says which."""
        if all(each is None for each in (self.ids, self.sink, self.consumer, self.code, self.text)):
            raise wrong("ids", "missing: give ids, a sink, a consumer, a code or a text")


class _Replay(_Selection):
    after: Annotated[Whole, Field(ge=0, le=_MAX_ID)] = Field(
        0, description="Behind this id: the `last` of the answer before."
    )
    limit: Annotated[Whole, Field(ge=1, le=_AT_ONCE)] = _AT_ONCE


class _Dropped(_Selection):
    replayed: Flag = Field(False, description="Only those that were replayed.")


class _Failed(BaseModel):
    id: int
    detail: str


class _Replayed(BaseModel):
    """What came of a replay; `left` of the selection are to be replayed by another request."""

    replayed: int
    failed: list[_Failed]
    left: bool
    last: int | None = Field(
        description="The id of the last one of these; null if there were none."
    )


class _Count(BaseModel):
    """How many were deleted."""

    dropped: int


async def _named(
    context: Context, sink: str | None, consumer: str | None
) -> tuple[str | None, str | None]:
    if sink is not None and consumer is not None:
        raise wrong("consumer", "a dead letter is of a sink or of a consumer: give one of them")
    if sink is not None:
        sink = await name_of(context, "sink", sink)
    if consumer is not None:
        consumer = await name_of(context, "consumer", consumer)
    return sink, consumer


async def _letter_of(context: Context, number: int) -> StoredLetter:
    letter = await context.run(context.store.letters.get, number)
    if letter is None:
        raise Problem(404, f"There is no dead letter {number}.")
    return letter


async def _replay(
    context: Context, letter: StoredLetter, line: Also, config: Config | None = None
) -> None:
    if letter.publisher is None:
        await (await context.consumers.get(letter.consumer or "")).replay(letter.id, line)
    elif context.tools is not None:
        config = config or await _publishing(context, [letter])
        await context.run_long(context.tools.replay, context.store, config, letter, line)
    else:
        raise Problem(409, "This process can't publish: `penstock dead-letters replay` can.")


async def _publishing(context: Context, letters: Iterable[StoredLetter]) -> Config:
    """Return what has the settings of the sinks and of the consumers that publish the letters."""
    names = {letter.consumer for letter in letters if letter.publisher is not None}
    return await pipelines_of(context, {name for name in names if name is not None})


@api.get(_LETTERS, response_model=_LettersPage, summary="List dead letters")
async def list_letters(context: AppContext, query: Annotated[_Listed, Query()]) -> Response:
    (last,) = after(query.cursor, int) or (None,)
    newest = query.order == "newest"
    sink, consumer = await _named(context, query.sink, query.consumer)
    found = await context.run(
        context.store.letters.page, sink, consumer, query.limit + 1,
        after=0 if newest else last or 0, newest=newest,
        through=max(last, 1) - 1 if newest and last is not None else None,
        code=query.code, text=query.text, replayed=query.replayed, key=query.idempotency_key,
    )  # fmt: skip
    page, following_ = following(found, query.limit, lambda letter: (letter.id,))
    return json_answer({"data": [_body(letter) for letter in page], "next": following_})


@api.get("/v1/dead-letter-causes", response_model=_Causes, summary="Count dead letters by cause")
async def list_causes(context: AppContext, query: Annotated[_Query, Query()]) -> Response:
    sink, consumer = await _named(context, query.sink, query.consumer)
    found = await context.run(
        context.store.letters.causes, sink, consumer, code=query.code, text=query.text,
        replayed=query.replayed, key=query.idempotency_key,
    )  # fmt: skip
    page, last = paged(found, query, _cause)
    return json_answer({"data": [each._asdict() for each in page], "next": last})


@api.get(f"{_LETTERS}/{{id}}", response_model=_WholeLetter, summary="Show a dead letter")
async def show_letter(context: AppContext, number: _Id) -> Response:
    letter = await _letter_of(context, number)
    return json_answer({**_body(letter), "message": letter.message})


@api.post(
    f"{_LETTERS}/{{id}}/replay",
    response_model=Success,
    summary="Deliver a dead letter again",
    description="A sink's, or a consumer's of type nats, is published once more; another consumer's "
    "goes back into it.",
    responses=documented(409, 424),
)
async def replay_letter(context: AppContext, number: _Id, request: Request) -> Response:
    letter = await _letter_of(context, number)
    of = of_letters(letter.sink, letter.consumer)
    line = Action(*of, "replay dead letter", {"id": number}).line(actor_of(request))
    await _replay(context, letter, line)
    return Json(SUCCESS)


@api.delete(f"{_LETTERS}/{{id}}", response_model=Success, summary="Delete a dead letter")
async def drop_letter(context: AppContext, number: _Id, request: Request) -> Response:
    letter = await _letter_of(context, number)

    def drop() -> None:
        if not context.store.letters.purge(id=number):
            raise Problem(404, f"There is no dead letter {number}.")

    of = of_letters(letter.sink, letter.consumer)
    await context.act(request, Action(*of, "drop dead letter", {"id": number}), drop)
    return Json(SUCCESS)


@api.post(
    "/v1/replay-dead-letters",
    response_model=_Replayed,
    summary="Deliver many dead letters again",
    description=f"Those with these `ids`, or the first {_AT_ONCE} that were not replayed of those "
    "that fit all that is given. What fails stays as it is; go on behind it by `after`.",
    responses=documented(409, 413),
    openapi_extra=body_of(_Replay),
)
async def replay_letters(context: AppContext, request: Request) -> Response:
    selection = _Replay.model_validate(await read_object(request))
    found, left = await _selected(context, selection)
    publishes = context.tools is not None and any(letter.publisher for letter in found)
    config = await _publishing(context, found) if publishes else None
    of = of_letters(*await _named(context, selection.sink, selection.consumer))
    action = Action(*of, "replay dead letters", _details(selection))
    line = await context.run(action.counting, context.store, actor_of(request))
    failed = []
    for letter in found:
        try:
            await _replay(context, letter, line, config)
        except (PenstockError, Problem) as error:
            failed.append({"id": letter.id, "detail": problem_of(error).detail})
    last = found[-1].id if found else None
    count = len(found) - len(failed)
    return json_answer({"replayed": count, "failed": failed, "left": left, "last": last})


async def _selected(context: Context, selection: _Replay) -> tuple[Sequence[StoredLetter], bool]:
    sink, consumer = await _named(context, selection.sink, selection.consumer)
    selection.check()
    if selection.ids is not None:
        if any(each is not None for each in (sink, consumer, selection.code, selection.text)):
            raise wrong("ids", "give ids alone, or a sink, a consumer, a code or a text")
        return [await _letter_of(context, number) for number in selection.ids], False
    limit = selection.limit
    found = await context.run(
        context.store.letters.page, sink, consumer, limit + 1, after=selection.after, replayed=False,
        code=selection.code, text=selection.text, through=selection.through,
    )  # fmt: skip
    return found[:limit], len(found) > limit


@api.post(
    "/v1/drop-dead-letters",
    response_model=_Count,
    summary="Delete many dead letters for ever",
    description="Those that fit all that is given; one of `ids`, `sink`, `consumer`, `code` and "
    "`text` must be.",
    responses=documented(413),
    openapi_extra=body_of(_Dropped),
)
async def drop_letters(context: AppContext, request: Request) -> Response:
    selection = _Dropped.model_validate(await read_object(request))
    sink, consumer = await _named(context, selection.sink, selection.consumer)
    selection.check()

    def drop() -> int:
        with context.store.transaction():
            count = sum(
                context.store.letters.purge(
                    sink, consumer, number, replayed=selection.replayed or None,
                    code=selection.code, text=selection.text, through=selection.through,
                )
                for number in selection.ids or (None,)
            )  # fmt: skip
            if count:
                action = *of_letters(sink, consumer), "drop dead letters"
                details = {**_details(selection), "count": count}
                note_action(context.store, *action, details, by=actor_of(request))
        return count

    return json_answer({"dropped": await context.run(drop)})


def _details(selection: _Selection) -> dict[str, Any]:
    """Return what the audit log has of a selection, which names what it is of."""
    return selection.model_dump(exclude={"sink", "consumer", "limit"}, exclude_defaults=True)


def _cause(cause: Cause) -> str:
    return json.dumps([cause.sink, cause.consumer, cause.code])


def _body(letter: StoredLetter) -> dict[str, Any]:
    body = dataclasses.asdict(letter)
    # A consumer's letter has its stream's own position here, which is not the message's.
    return {name: value for name, value in body.items() if name not in ("message", "lsn", "idx")}
