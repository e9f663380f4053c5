"""The session of connectors: retries, limits, logins, refused addresses, and no secret shown."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from tests.loopback_api import Answer, Asked, LoopbackApi

from penstock.config.api_logins import ApiKey, Bearer, ClientCredentials, HttpBasic, RefreshToken
from penstock.syncs.auth import signer_of
from penstock.syncs.errors import SyncError
from penstock.syncs.local_budget import LocalBudget
from penstock.syncs.rate_headers import RateHeaders, rate_limit, retry_after
from penstock.syncs.session import ApiSession
from penstock.syncs.tokens import LocalTokens, OAuthTokens

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
IN_30_S = str(int(NOW.timestamp()) + 30)
X, H = "X-RateLimit-", "X-HubSpot-RateLimit-"


class Counted:
    """A budget that counts."""

    def __init__(self) -> None:
        self.open = 0
        self.seen: list[int] = []

    def acquire(self) -> None:
        self.open += 1

    def release(self, headers: Mapping[str, str], status: int) -> None:
        self.open -= 1
        self.seen.append(status)


def session(budget: Counted, waits: list[float], **kwargs: object) -> ApiSession:
    return ApiSession(budget, sleep=waits.append, allow_private=True, **kwargs)  # type: ignore[arg-type]  # the test's own settings


def answering(*answers: Answer) -> Callable[[Asked], Answer]:
    left = list(answers)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]


OK = Answer({"fine": True})


@pytest.mark.parametrize(
    ("first", "least", "most"),
    [
        (Answer(status=429, headers={"Retry-After": "7"}), 7.0, 7.7),
        (Answer(status=429), 0.2, 0.5),
        (
            Answer(status=429, headers={"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "9"}),
            9.0,
            9.9,
        ),
        (
            Answer(status=403, headers={"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "3"}),
            3.0,
            3.3,
        ),
        (Answer({"message": "You have exceeded a secondary rate limit"}, status=403), 0.2, 0.5),
        (Answer(status=500), 0.2, 0.5),
        (Answer(status=503, headers={"Retry-After": "2"}), 2.0, 2.2),
        (Answer(b'{"fine": tr', headers={"Content-Length": "14"}, cut=11), 0.2, 0.5),
        (Answer(b'{"fine": tr'), 0.2, 0.5),
        (Answer(status=200, headers={"Content-Length": "50"}, cut=0), 0.2, 0.5),
    ],
)
def test_what_is_transient_is_tried_again(first: Answer, least: float, most: float) -> None:
    budget, waits = Counted(), list[float]()
    with LoopbackApi(answering(first, OK)) as api:
        assert session(budget, waits).request("GET", api.url).json() == {"fine": True}
    assert len(waits) == 1
    assert least <= waits[0] <= most
    assert len(budget.seen) == 2
    assert budget.open == 0


def test_retry_after_as_a_date_goes_by_the_clock_of_the_api() -> None:
    budget, waits = Counted(), list[float]()
    then = Answer(
        status=429,
        headers={"Retry-After": format_datetime(NOW + timedelta(seconds=11), usegmt=True)},
    )
    with LoopbackApi(answering(then, OK)) as api:
        api.date = format_datetime(NOW, usegmt=True)
        found = session(budget, waits)
        found.request("GET", api.url)
    assert 10.5 <= waits[0] <= 12.2
    assert abs(found.now - NOW) < timedelta(seconds=30)


def test_a_long_retry_after_is_the_schedulers() -> None:
    budget, waits = Counted(), list[float]()
    later = Answer(status=429, headers={"Retry-After": "600"})
    with LoopbackApi(answering(later)) as api, pytest.raises(SyncError) as caught:
        session(budget, waits).request("GET", api.url)
    assert waits == []
    assert (caught.value.code, caught.value.retry_after) == ("rate_limited", 600.0)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.code, copy.retry_after, copy.transient) == ("rate_limited", 600.0, True)


@pytest.mark.parametrize(
    ("status", "code", "transient"),
    [
        (400, "refused", False), (401, "unauthorized", False), (403, "forbidden", False),
        (404, "not_found", False), (410, "not_found", False), (408, "timed_out", True),
        (422, "refused", False), (429, "rate_limited", True), (500, "unavailable", True),
    ],
)  # fmt: skip
def test_errors_by_status(status: int, code: str, transient: bool) -> None:
    budget = Counted()
    refusal = Answer({"error": {"message": "Key sk_live_4711 is not good."}}, status=status)
    with LoopbackApi(answering(refusal)) as api:
        found = session(budget, [], signer=signer_of(Bearer(type="bearer", token="sk_live_4711")))
        with pytest.raises(SyncError) as caught:
            found.request("GET", f"{api.url}/v1/things?key=sk_live_4711")
    assert (caught.value.code, caught.value.transient) == (code, transient)
    assert "/v1/things answers" in str(caught.value)
    assert "is not good." in str(caught.value)
    assert "4711" not in str(caught.value)


def test_a_refused_connection() -> None:
    with LoopbackApi(answering(OK)) as api:
        url = api.url
    waits: list[float] = []
    with pytest.raises(SyncError, match="takes no connection") as caught:
        session(Counted(), waits).request("GET", url)
    assert caught.value.transient
    assert len(waits) == 4


def test_an_answer_that_does_not_come() -> None:
    done = threading.Event()

    def answer(_: Asked) -> Answer:
        done.wait(30)
        return OK

    budget = Counted()
    with LoopbackApi(answer) as api:
        with pytest.raises(SyncError, match="does not answer in time") as caught:
            session(budget, [], timeouts=(5.0, 0.1), attempts=2).request("GET", api.url)
        done.set()
    assert (caught.value.code, caught.value.transient) == ("timed_out", True)
    assert (budget.open, budget.seen) == (0, [0, 0])


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "2130706433", "169.254.169.254"]
)
def test_private_addresses_are_refused(host: str) -> None:
    budget = Counted()
    with pytest.raises(SyncError, match="allow_private: true") as caught:
        ApiSession(budget).request("GET", f"http://{host}:9/")
    assert caught.value.code == "private_address"
    assert budget.open == 0


def test_a_redirect_to_another_host_is_not_followed() -> None:
    with LoopbackApi(answering(OK)) as other:
        to = Answer(status=302, headers={"Location": f"{other.url}/x?token=abcdef"})
        with (
            LoopbackApi(answering(to)) as api,
            pytest.raises(SyncError, match="redirects") as caught,
        ):
            session(Counted(), []).request("GET", api.url)
        assert not other.asked
    assert "abcdef" not in str(caught.value)


def test_a_redirect_on_the_same_host_is() -> None:
    def answer(asked: Asked) -> Answer:
        return Answer(status=301, headers={"Location": "/new"}) if asked.path == "/old" else OK

    with LoopbackApi(answer) as api:
        found = session(Counted(), [], signer=signer_of(Bearer(type="bearer", token="secret")))
        assert found.request("GET", f"{api.url}/old").json() == {"fine": True}
        assert api.asked[-1].headers["authorization"] == "Bearer secret"


@pytest.fixture
def api() -> Iterator[LoopbackApi]:
    with LoopbackApi(answering(Answer(status=500), OK)) as found:
        yield found


def test_logins(api: LoopbackApi) -> None:
    for auth in (
        Bearer(type="bearer", token="t0ken"),
        HttpBasic(type="http_basic", username="me", password="pass"),
        ApiKey(type="api_key", name="X-Key", api_key="k3y"),
        ApiKey(type="api_key", name="key", api_key="k 3&y", location="query"),
    ):
        session(Counted(), [], signer=signer_of(auth)).request("GET", api.url, params={"a": "1"})
    bearer, *_ = api.asked
    assert bearer.headers["authorization"] == "Bearer t0ken"
    assert api.asked[2].headers["authorization"] == "Basic bWU6cGFzcw=="
    assert api.asked[3].headers["x-key"] == "k3y"
    assert api.asked[4].query == {"a": "1", "key": "k 3&y"}


def test_another_host_does_not_get_the_login(api: LoopbackApi) -> None:
    signer = signer_of(Bearer(type="bearer", token="t0ken"))
    session(Counted(), [], signer=signer, origin="https://api.example.com").request("GET", api.url)
    assert "authorization" not in api.asked[0].headers


def test_a_refused_token_is_replaced_once() -> None:
    issued: list[dict[str, str]] = []

    def answer(asked: Asked) -> Answer:
        if asked.path == "/token":
            form = dict(part.split("=") for part in asked.body.decode().split("&"))
            issued.append(form)
            n = len(issued)
            return Answer({"access_token": f"a{n}", "refresh_token": f"r{n}", "expires_in": 3600})
        good = asked.headers["authorization"] == "Bearer a2"
        return OK if good else Answer(status=401)

    kept: list[OAuthTokens] = []
    with LoopbackApi(answer) as api:
        auth = RefreshToken(
            type="oauth2_refresh_token", access_token_url=f"{api.url}/token",
            client_id="me", client_secret="hush", refresh_token="r0",
        )  # fmt: skip
        found = session(Counted(), [], signer=signer_of(auth, LocalTokens(kept.append)))
        assert found.request("GET", f"{api.url}/things").json() == {"fine": True}
        found.request("GET", f"{api.url}/things")
    assert [form["refresh_token"] for form in issued] == ["r0", "r1"]
    assert [tokens.refresh_token for tokens in kept] == ["r1", "r2"]


def test_client_credentials_that_are_wrong() -> None:
    with LoopbackApi(answering(Answer({"error_description": "no hush"}, status=400))) as api:
        auth = ClientCredentials(
            type="oauth2_client_credentials", access_token_url=f"{api.url}/token",
            client_id="me", client_secret="hush",
        )  # fmt: skip
        with pytest.raises(SyncError, match="gives no token") as caught:
            session(Counted(), [], signer=signer_of(auth)).request("GET", api.url)
    assert caught.value.code == "unauthorized"
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, RateHeaders()),
        ({X + "Remaining": "5", X + "Limit": "60", X + "Reset": IN_30_S}, RateHeaders(5, 60, 30.0)),
        ({"RateLimit-Remaining": "5", "RateLimit-Reset": "30"}, RateHeaders(5, None, 30.0)),
        ({"RateLimit-Remaining": "5", "RateLimit-Limit": "60, 60;w=60"}, RateHeaders(5, 60)),
        ({"RateLimit": '"default";r=5;t=30'}, RateHeaders(5, None, 30.0)),
        ({"RateLimit": "limit=60, remaining=5, reset=30"}, RateHeaders(5, 60, 30.0)),
        ({H + "Remaining": "5", H + "Interval-Milliseconds": "500"}, RateHeaders(5, None, 0.5)),
        ({"Sforce-Limit-Info": "api-usage=18/5000"}, RateHeaders(4982, 5000)),
        ({"X-RateLimit-Remaining": "many"}, RateHeaders()),
    ],
)  # fmt: skip
def test_rate_limit_headers(headers: dict[str, str], expected: RateHeaders) -> None:
    assert rate_limit(headers, NOW) == expected


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "Thu, 99 Foo 2026 00:00:00 GMT", ""])
def test_an_unusable_retry_after(text: str) -> None:
    assert retry_after({"Retry-After": text}, NOW) is None


def test_a_local_budget_spreads_requests() -> None:
    waits: list[float] = []
    budget = LocalBudget(2, timedelta(seconds=1), 3, sleep=waits.append, clock=lambda: 100.0)
    for _ in range(3):
        budget.acquire()
    assert waits == [0.5, 1.0]
    budget.release({"RateLimit": '"d";r=0;t=9'}, 200)
    budget.acquire()
    assert waits[-1] == 9.0
