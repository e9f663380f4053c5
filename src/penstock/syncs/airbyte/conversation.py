"""One order that a process does, and what it asks for meanwhile: requests, and waits between them."""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Generator, Mapping
from typing import Any, Final

import requests

from penstock.syncs.airbyte.process import PROCESSES, Process, Said
from penstock.syncs.connectors.contract import Session
from penstock.syncs.errors import SyncError
from penstock.syncs.masking import without_secrets
from penstock.syncs.session import ATTEMPTS, PATIENCE
from penstock.syncs.tokens import OAuthTokens, no_token

_QUERY: Final = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")
_REMEDY: Final = (
    "Compare the manifest with what the API answers, and with the version of airbyte-cdk."
)

_JOB_WAIT: Final = 60.0
"""So many seconds after jobs have failed, others are made; a read has tried three times by itself."""


class Conversation:
    """One order.

    Args:
        session: Makes the requests; None: none may be made.
        secrets: What no error shows; what logs requests in is added.
        attempts: So many failures in a row end the order.
    """

    def __init__(
        self, session: Session | None, secrets: tuple[str, ...], attempts: int = ATTEMPTS
    ) -> None:
        self._session: Final = session
        self._secrets: Final = list(secrets)
        self._attempts: Final = attempts
        self._failures = 0
        self._failure: SyncError | None = None
        self._waited = 0.0
        self._ended = False
        self._refused: dict[tuple[str, str], SyncError] = {}
        self.needs_session = False
        """Whether it has been given up for a request that no session could make."""

    def messages(self, order: Mapping[str, Any]) -> Generator[Said, None, None]:
        """Give an order, and yield its pages and its end.

        Raises `SyncError`. A process whose order is given up is used again.
        """
        wait = time.sleep if self._session is None else self._session.wait
        with PROCESSES.lent(wait) as process:
            process.send(order)
            raised: BaseException | None = None
            try:
                yield from self._messages(process)
            except _Given as given:
                raised = given.error
            except GeneratorExit as error:
                if not self._ended:
                    self._stop(process)
                raised = error
        if raised is not None:
            raise raised

    def _messages(self, process: Process) -> Generator[Said, None, None]:
        while True:
            said = process.receive()
            match said.do:
                case "send" | "wait":
                    process.send(self._done(process, said))
                case "tokens":
                    process.send(self._tokens(process, said))
                case "page":
                    yield said
                    process.send({})
                case "end":
                    self._ended = True
                    yield said
                    return
                case "jobs_failed":
                    raise _Given(
                        SyncError(
                            said.code, self._shown(said.text) + ".", remedy=said.remedy,
                            transient=True, retry_after=_JOB_WAIT,
                        )
                    )  # fmt: skip
                case "refused":
                    raise _Given(SyncError(said.code, self._shown(said.text), remedy=said.remedy))
                case _:
                    raise _Given(self._failed(said))

    def _done(self, process: Process, said: Said) -> dict[str, Any]:
        try:
            return self._sent(said) if said.do == "send" else self._slept(said)
        except BaseException as error:  # the run may end in it, too
            self._stop(process)
            raise _Given(error) from None

    def _tokens(self, process: Process, said: Said) -> dict[str, Any]:
        """Return the tokens that are kept, or those that the process gets now, in its turn."""
        try:
            keeper = self._with_session().tokens
            kept = keeper.load()
            if kept is None or kept.access_token == said.access or kept.is_ending:
                kept = keeper.renew(kept, lambda known: self._renewed(process, known))
        except _Given:
            raise
        except BaseException as error:  # as above
            self._stop(process)
            raise _Given(error) from None
        self._secrets.extend((kept.access_token, kept.refresh_token))
        return {
            "access": kept.access_token,
            "refresh": kept.refresh_token,
            "ends": kept.expires_at,
        }

    def _renewed(self, process: Process, kept: OAuthTokens | None) -> OAuthTokens:
        process.send({"refresh_with": "" if kept is None else kept.refresh_token})
        while (said := process.receive()).do in ("send", "wait"):
            process.send(self._done(process, said))
        if said.do != "renewed":
            raise _Given(self._failed(said))
        return OAuthTokens(said.access, said.ends, said.refresh)

    def _stop(self, process: Process) -> None:
        """Have the process give its order up, so that it can take another."""
        process.send({"stop": True})
        while process.receive(30.0).do in ("send", "wait", "page", "tokens", "renewed"):
            process.send({"stop": True})

    def refuse_ignored(self) -> None:
        """Raise the error of a request that the manifest ignores: what it lists is not complete."""
        for error in self._refused.values():
            raise SyncError(
                "bad_response",
                f"{error.message} The manifest goes on without it. The sweep deletes nothing.",
                remedy="Let the manifest fail there, or set `deletes: {type: none}`.",
            )

    def _with_session(self) -> Session:
        if self._session is None:
            self.needs_session = True
            raise SyncError("connector", "The API must be asked for that.")
        return self._session

    def _sent(self, said: Said) -> dict[str, Any]:
        session = self._with_session()
        login = {name.lower(): value for name, value in said.headers.items()}.get("authorization")
        if login and not {login, login.rpartition(" ")[2]} <= set(self._secrets):
            self._secrets.extend((login, login.rpartition(" ")[2]))
        body = None if said.body is None else base64.b64decode(said.body)
        request = requests.PreparedRequest()
        request.prepare(said.method, said.url, said.headers, data=body)
        response, failure = session.exchange(request)
        key = said.method, said.url
        if said.ending:
            pass
        elif failure is None:
            self._failures, self._failure = 0, None
            self._refused.pop(key, None)
        else:
            failure = SyncError(
                failure.code, self._shown(failure.message), remedy=failure.remedy,
                transient=failure.transient, retry_after=failure.retry_after,
            )  # fmt: skip
            self._note(failure)
            self._refused[key] = failure
        if response is None or (failure is not None and response.status_code < 400):
            assert failure is not None  # noqa: S101 - one of the two
            return {"failed": failure.message}
        return {
            "status": response.status_code,
            "reason": response.reason or "",
            "headers": list(response.headers.items()),
            "body": binascii.b2a_base64(response.content, newline=False).decode(),
        }

    def _note(self, failure: SyncError) -> None:
        self._failure, self._waited = failure, 0.0
        if not failure.transient:
            return
        self._failures += 1
        if self._failures >= self._attempts:
            raise failure
        if (after := failure.retry_after) is not None:
            if after > PATIENCE:
                raise failure
            # Whatever the manifest says of waiting, the API is obeyed.
            self._wait(after)
            self._waited = after

    def _slept(self, said: Said) -> dict[str, Any]:
        seconds = max(said.seconds - self._waited, 0.0)
        self._waited = 0.0
        if self._failure is not None and self._failure.transient and seconds > PATIENCE:
            raise self._failure
        if seconds:
            self._wait(seconds)
        return {}

    def _wait(self, seconds: float) -> None:
        if self._session is not None:
            self._session.wait(seconds)

    def _failed(self, said: Said) -> SyncError:
        """Return why an order failed: what the API has answered, or what the manifest's code reports."""
        if self._failure is not None:
            return no_token(self._failure) if said.do == "no_token" else self._failure
        text = self._shown(said.text)
        return SyncError("connector", f"The manifest can't be run: {text}.", remedy=_REMEDY)

    def _shown(self, text: str) -> str:
        return without_secrets(_QUERY.sub(r"\1", text), self._secrets).rstrip(".")


class _Given(Exception):  # noqa: N818 - it carries an error past the process, which is used again
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error: Final = error
