"""The HTTP session of connectors: budget, login, retries, time-outs, and errors without secrets."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

import msgspec
import requests
from requests.adapters import HTTPAdapter

from penstock.core.backoff import wait_after
from penstock.syncs.errors import SyncError
from penstock.syncs.masking import without_secrets
from penstock.syncs.rate_headers import http_date, rate_limit, retry_after
from penstock.syncs.responses import broken, error_of, is_throttled, status_of
from penstock.syncs.tokens import LocalTokens, TokenKeeper
from penstock.syncs.transport import PublicAdapter, origin_of

ATTEMPTS: Final = 5
TIMEOUTS: Final = (10.0, 60.0)
PATIENCE: Final = 30.0
"""How many seconds a session waits by itself; where an API wants more, the scheduler waits."""
_FIRST_WAIT: Final = 0.5
_MOST_REDIRECTS: Final = 5


class Budget(Protocol):
    """How many requests a credential may make; shared by all that make them."""

    def acquire(self) -> None:
        """Wait until a request may be made; raises `SyncError` where that is too far away."""

    def release(self, headers: Mapping[str, str], status: int) -> None:
        """Note that the request has ended, and with which headers; status 0: without an answer."""


class Signer(Protocol):
    """Signs requests: see `penstock.syncs.auth`."""

    def sign(self, request: requests.PreparedRequest, send: Send) -> None:
        """Add what logs the request in, in the place of what an earlier call added."""

    def renew(self, send: Send) -> bool:
        """After a 401: get another token; return whether there is one now."""

    @property
    def secrets(self) -> Iterable[str]:
        """What must not be shown."""


Send = Callable[[requests.Request], requests.Response]


class _Http(requests.Session):
    """A session of requests, each of which obeys."""

    def __init__(self, owner: ApiSession) -> None:
        super().__init__()
        self._owner: Final = owner
        self.max_redirects = _MOST_REDIRECTS
        # Without one, requests reads logins of ~/.netrc.
        self.auth = _unsigned

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        return self._owner.send(request, kwargs)

    def transmit(self, request: requests.PreparedRequest, kwargs: Any) -> requests.Response:
        """Send once, and read the answer whole."""
        kwargs["stream"] = False
        kwargs["verify"] = kwargs.get("verify") or True
        kwargs["allow_redirects"] = False
        return super().send(request, **kwargs)


class ApiSession:
    """What connectors make their requests with: see `contract.Session`.

    Args:
        budget: Is asked before each request.
        signer: Logs requests in, those to `origin` alone.
        origin: The API's URL; None: each request's own is taken.
        allow_private: Whether addresses of private networks may be called.
        secrets: What must not be shown, beside the signer's.
        sleep: Waits; a run that ends has it raise.
        tokens: Keeps the tokens of connectors that sign in by themselves.
    """

    def __init__(
        self,
        budget: Budget,
        signer: Signer | None = None,
        *,
        origin: str | None = None,
        allow_private: bool = False,
        secrets: Iterable[str] = (),
        sleep: Callable[[float], object] = time.sleep,
        attempts: int = ATTEMPTS,
        timeouts: tuple[float, float] = TIMEOUTS,
        tokens: TokenKeeper | None = None,
    ) -> None:
        self._budget: Final = budget
        self._signer: Final = signer
        self._origin: Final = None if origin is None else origin_of(origin)
        self._secrets: Final = tuple(secrets)
        self._sleep: Final = sleep
        self._attempts: Final = attempts
        self._timeouts: Final = timeouts
        self._tokens: Final[TokenKeeper] = LocalTokens() if tokens is None else tokens
        self._skew = timedelta()
        self._http: Final = _Http(self)
        adapter = HTTPAdapter() if allow_private else PublicAdapter()
        for scheme in ("https://", "http://"):
            self._http.mount(scheme, adapter)

    @property
    def http(self) -> requests.Session:
        """The same as a session of requests."""
        return self._http

    @property
    def tokens(self) -> TokenKeeper:
        """What keeps the tokens of a connector that signs in by itself."""
        return self._tokens

    @property
    def now(self) -> datetime:
        """The time by the API's clock, in whole seconds at most too early."""
        return datetime.now(UTC) + self._skew

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def request(
        self,
        method: str,
        url: str,
        *,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> requests.Response:
        """Return a successful response; raises `SyncError`."""
        try:
            return self._http.request(method, url, params=params, json=json, headers=headers)
        except (requests.exceptions.RequestException, ValueError) as error:
            raise self._broken(error, url) from None

    def exchange(
        self, request: requests.PreparedRequest
    ) -> tuple[requests.Response | None, SyncError | None]:
        """Send a request once, without a login; return the answer, and what is wrong."""
        url = request.url or ""
        kwargs = self._http.merge_environment_settings(url, {}, False, None, None)
        failure, response = self._once(request, dict(kwargs), signed=False)
        return response, failure

    def wait(self, seconds: float) -> None:
        """Wait, unless the run ends."""
        self._sleep(seconds)

    def shown(self, text: str) -> str:
        """Return a text without secrets."""
        own = self._signer.secrets if self._signer else ()
        return without_secrets(text, (*self._secrets, *own))

    def send(self, request: requests.PreparedRequest, kwargs: dict[str, Any]) -> requests.Response:
        """Send a request until it succeeds or can't; raises `SyncError`."""
        for _ in range(_MOST_REDIRECTS + 1):
            response = self._answered(request, kwargs)
            target = self._http.get_redirect_target(response)
            if target is None:
                return response
            request = self._redirected(request, response, target)
        raise SyncError("bad_response", f"{self._where(request)} redirects in circles.")

    def _redirected(
        self, request: requests.PreparedRequest, response: requests.Response, target: str
    ) -> requests.PreparedRequest:
        url = requests.compat.urljoin(request.url or "", target)
        if origin_of(url) != origin_of(request.url or "") or request.method not in ("GET", "HEAD"):
            raise SyncError(
                "refused",
                f"{self._where(request)} answers {response.status_code} and redirects to "
                f"{self.shown(_bare(url))}, which is not asked: it would get the login.",
                remedy="Name the address that answers in the provider.",
            )
        following = request.copy()
        following.url = url
        return following

    def _answered(
        self, request: requests.PreparedRequest, kwargs: dict[str, Any]
    ) -> requests.Response:
        renewed = False
        failures = 0
        while True:
            failure, response = self._once(request, kwargs)
            if failure is None and response is not None:
                return response
            if failure is None:
                continue
            if failure.code == "unauthorized" and not renewed and self._renewed(request):
                renewed = True
                continue
            failures += 1
            if not failure.transient or failures >= self._attempts:
                raise failure
            wait = failure.retry_after
            if wait is None:
                wait = wait_after(failures, _FIRST_WAIT, PATIENCE, 0.5)
            elif wait > PATIENCE:
                raise failure
            else:
                # Those who were refused together do not come back together.
                wait += random.uniform(0.0, 0.1 * wait)  # noqa: S311 - no secret
            self._sleep(wait)

    def _renewed(self, request: requests.PreparedRequest) -> bool:
        return (
            self._signer is not None
            and self._signs(request)
            and self._signer.renew(self._send_unsigned)
        )

    def _signs(self, request: requests.PreparedRequest) -> bool:
        return self._origin is None or origin_of(request.url or "") == self._origin

    def _once(
        self, request: requests.PreparedRequest, kwargs: dict[str, Any], *, signed: bool = True
    ) -> tuple[SyncError | None, requests.Response | None]:
        request = request.copy()
        # A library's hook would raise before a status is looked at.
        request.hooks = requests.hooks.default_hooks()
        if signed and self._signer is not None and self._signs(request):
            self._signer.sign(request, self._send_unsigned)
        self._budget.acquire()
        headers: Mapping[str, str] = {}
        status = 0
        try:
            kwargs = {**kwargs, "timeout": self._timeouts}
            try:
                response = self._http.transmit(request, kwargs)
            except (requests.exceptions.RequestException, ValueError) as error:
                return self._broken(error, request.url or ""), None
            headers, status = response.headers, response.status_code
        finally:
            self._budget.release(headers, status)
        self._note_time(response)
        return self._failure(request, response), response

    def _send_unsigned(self, request: requests.Request) -> requests.Response:
        """Send a request for a token: it does not carry the API's login, and is tried again too."""
        prepared = self._http.prepare_request(request)
        failures = 0
        while True:
            failure, response = self._once(prepared, {}, signed=False)
            if failure is None and response is not None:
                return response
            assert failure is not None  # noqa: S101 - one of the two
            failures += 1
            if not failure.transient or failures >= self._attempts:
                raise failure
            self._sleep(
                min(failure.retry_after or wait_after(failures, _FIRST_WAIT, 10.0, 0.5), PATIENCE)
            )

    def _note_time(self, response: requests.Response) -> None:
        # What a cache has answered has the time at which it was filled.
        if "Age" not in response.headers and (then := http_date(response.headers.get("Date", ""))):
            self._skew = then - datetime.now(UTC)

    def _failure(
        self, request: requests.PreparedRequest, response: requests.Response
    ) -> SyncError | None:
        status = response.status_code
        if status < 400:
            if "json" in response.headers.get("Content-Type", "") and response.content:
                try:
                    msgspec.json.decode(response.content, type=msgspec.Raw)
                except msgspec.DecodeError as error:
                    return SyncError(
                        "bad_response",
                        f"{self._where(request)} answers with broken JSON: {error}.",
                        transient=True,
                    )
            return None
        after = retry_after(response.headers, self.now)
        left = rate_limit(response.headers, self.now)
        throttled = is_throttled(response, left, after)
        if after is None and throttled and left.remaining == 0:
            after = left.reset
        return error_of(
            status,
            throttled=throttled,
            where=self._where(request),
            text=self.shown(status_of(response)),
            retry_after=after,
        )

    def _where(self, request: requests.PreparedRequest) -> str:
        return f"{request.method} {self.shown(_bare(request.url or ''))}"

    def _broken(self, error: Exception, url: str) -> SyncError:
        return broken(error, self.shown(_bare(url)), self.shown(str(error)))


def _unsigned(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


def _bare(url: str) -> str:
    """Return a URL without its query, in which keys may stand."""
    return url.partition("?")[0].partition("#")[0]
