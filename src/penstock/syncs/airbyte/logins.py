"""The tokens of OAuth of a manifest's logins: a part of `worker`.

Where the API replaces the refresh token, Penstock keeps both tokens for all processes that use the
credential, and one of them at a time gets new ones. Other tokens are kept in this process alone.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import dpath
from airbyte_cdk.sources.declarative.auth.oauth import (
    DeclarativeOauth2Authenticator,
    DeclarativeSingleUseRefreshTokenOauth2Authenticator,
)
from airbyte_cdk.utils.datetime_helpers import AirbyteDateTime, ab_datetime_now

_EARLY: Final = timedelta(seconds=60)
_MOST: Final = 256
_PATHS: Final = (
    ("access_token_config_path", ["credentials", "access_token"]),
    ("token_expiry_date_config_path", ["credentials", "token_expiry_date"]),
)

_REFRESH: Final = "refresh_token_config_path", ["credentials", "refresh_token"]

_logins: dict[str, Any] = {}
"""The logins of an order by the header that they set."""
_held: dict[str, Any] = {}
"""What Penstock has given in this order."""
_cached: dict[str, tuple[str, AirbyteDateTime]] = {}
_from_api: Final = DeclarativeOauth2Authenticator.refresh_and_set_access_token
_ask: Callable[..., dict[str, Any]]


class NoTokenError(BaseException):
    """The server gives no token; no `except Exception` of a library tries again with the old one."""


def install(ask: Callable[..., dict[str, Any]]) -> None:
    """Have all logins get their tokens here; `ask` sends Penstock a message, and returns its answer."""
    global _ask
    _ask = ask
    rotating: Any = DeclarativeSingleUseRefreshTokenOauth2Authenticator
    rotating.get_access_token = _access_token
    rotating.refresh_and_set_access_token = _exchange
    DeclarativeOauth2Authenticator.refresh_and_set_access_token = _refresh  # for all of the process


def begin(updaters: list[Any], config: dict[str, Any]) -> None:
    """Begin an order: what Penstock keeps for a login need not stand in the configuration."""
    _logins.clear()
    _held.clear()
    for updater in updaters:
        if dpath.get(config, updater.get(*_REFRESH), default=None):
            for path in (updater.get(*each) for each in _PATHS):
                if dpath.get(config, path, default=None) is None:
                    dpath.new(config, path, "")


def another(header: str) -> str | None:
    """Return what logs in instead of a header that the API has refused; None: nothing else does."""
    login = _logins.get(header)
    if login is None:
        return None
    login.refresh_and_set_access_token()
    found: str = login.get_auth_header()["Authorization"]
    return None if found == header else found


def _note(login: Any) -> None:
    _logins[f"Bearer {login.access_token}"] = login


def _access_token(login: Any) -> str:
    # What the user has given may have been replaced since: Penstock is asked first.
    if not _held:
        _exchange(login)
    if login.access_token != _held["access"]:
        _take(login)
    if login.token_has_expired():
        _exchange(login)
    found: str = login.access_token
    return found


def _exchange(login: Any) -> None:
    """Get tokens of Penstock, which may want this process to get new ones."""
    answer = _ask("tokens", access=_held.get("access", ""))
    if "refresh_with" in answer:
        if kept := answer["refresh_with"]:
            login.set_refresh_token(kept)
        access, ends, refresh = _asked(login.refresh_access_token)
        refresh = refresh or login.get_refresh_token()
        answer = _ask("renewed", access=access, refresh=refresh, ends=ends.timestamp())
    _held.update(answer)
    _take(login)


def _take(login: Any) -> None:
    login.access_token = _held["access"]
    login.set_refresh_token(_held["refresh"])
    login.set_token_expiry_date(
        AirbyteDateTime.from_datetime(datetime.fromtimestamp(_held["ends"], UTC))
    )
    _note(login)


def _asked(get: Callable[[], Any]) -> Any:
    try:
        found = get()
    except Exception as error:
        raise NoTokenError from error
    if found and not found[0]:
        raise NoTokenError from ValueError("its answer has no access token")
    return found


def _refresh(login: Any) -> None:
    """Get another token, or take the one that an earlier order has got by the same login."""
    key = json.dumps(
        [
            login.get_token_refresh_endpoint(),
            login.build_refresh_request_body(),
            login.build_refresh_request_query_params(),
            login.build_refresh_request_headers(),
        ],
        sort_keys=True,
        default=str,
    )
    before = login._current_access_token_or_none()
    access, ends = _cached.get(key, (None, None))
    if ends is not None and access != before and ends - _EARLY > ab_datetime_now():
        login.access_token = access
        login.set_token_expiry_date(ends)
    else:
        _asked(lambda: _from_api(login))
        if len(_cached) >= _MOST:
            _cached.clear()
        _cached[key] = login.access_token, login.get_token_expiry_date()
    _note(login)
