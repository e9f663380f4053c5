"""What a page is made of: its routes, and the visit that each of its endpoints is given.

A page is a module of its own with a `PAGE`, and a folder of its name below `templates/`. It knows the
product by `Visit.api` alone, which calls the management API with the session's grant.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from penstock.api.auth import Grant
from penstock.api.console.calls import MAX_PAGE, Answer, CallError, Management
from penstock.api.console.forms import Form
from penstock.api.console.render import render
from penstock.api.console.sessions import PATH, Session

MOST: Final = 20_000
"""How many things a list is searched and sorted among; beyond, the page says that there are more."""


class Visit:
    """One request of a session that has logged in."""

    def __init__(
        self,
        request: Request,
        session: Session,
        management: Management,
        page: ConsolePage,
        pages: Sequence[ConsolePage],
        form: Form,
    ) -> None:
        assert session.grant is not None  # noqa: S101 - for the type checker
        self.request = request
        self.session = session
        self.grant: Grant = session.grant
        self.page = page
        self.pages = pages
        self.form = form
        """The fields that were posted; empty for a GET."""
        self.cut = 0
        """How many were read of a list that has more, 0 where each was read whole."""
        self._management = management

    @property
    def admin(self) -> bool:
        """Whether changes are offered."""
        return self.grant.role == "admin"

    @property
    def query(self) -> dict[str, str]:
        """The query of the URL."""
        return dict(self.request.query_params)

    @property
    def notice(self) -> str:
        """The sentence about what was done before the redirect here, if any."""
        return self.page.notices.get(self.request.query_params.get("done", ""), "")

    def part(self, name: str) -> str:
        """Return a part of the path, as in `/{name}`."""
        return str(self.request.path_params[name])

    # The management API.

    async def api(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Return what the management API answers, which may be a problem."""
        return await self._management.call(self.grant, method, path, query, body, headers)

    async def get(self, path: str, **query: Any) -> Any:
        """Return the JSON at a path; a problem becomes the answer to this visit."""
        answer = await self.api("GET", path, query)
        if not answer.ok:
            raise CallError(answer)
        return answer.body

    async def all(self, path: str, **query: Any) -> list[dict[str, Any]]:
        """Return a list to its end, up to `MOST`."""
        answer = await self.whole(path, **query)
        if not answer.ok:
            raise CallError(answer)
        found: list[dict[str, Any]] = answer.body["data"]
        return found

    async def whole(self, path: str, **query: Any) -> Answer:
        """Return a list to its end as one answer, up to `MOST`, or the problem that there was."""
        found: list[dict[str, Any]] = []
        while True:
            answer = await self.api("GET", path, {"limit": MAX_PAGE, **query})
            if not answer.ok:
                return answer
            found += answer.body["data"]
            query["cursor"] = answer.body["next"]
            if query["cursor"] is None or len(found) >= MOST:
                break
        if query["cursor"] is not None:
            self.cut = len(found)
        return Answer(200, {"data": found})

    def missing(self, cause: str) -> NoReturn:
        """Answer that there is no such thing."""
        raise CallError(Answer(404, {"detail": cause}))

    def fail(self, answer: Answer) -> NoReturn:
        """Answer with a problem of the API, as a page of its own."""
        raise CallError(answer)

    # Answers.

    def render(self, template: str, code: int = 200, /, **given: Any) -> Response:
        """Return a page: `template` is below `templates/`, `code` the HTTP status.

        To htmx, which swaps a part of a page, it is the `content` block alone.
        """
        partial = self.request.headers.get("hx-request-type") == "partial"
        layout = "fragment.html" if partial else "layout.html"
        values = {"layout": layout, "visit": self, "page": self.page, "form": self.form}
        values |= {"pages": self.pages, **given}
        return HTMLResponse(render(template, **values), code)

    def json(self, body: Any) -> Response:
        """Return JSON, as charts read it."""
        return JSONResponse(body)

    def redirect(self, path: str = "", done: str = "") -> Response:
        """Return the way to a page after a change; `done` is a key of the page's notices."""
        where = f"{PATH}/{path or self.page.name}"
        where += f"{'&' if '?' in where else '?'}done={done}" if done else ""
        if "hx-request" in self.request.headers:
            return Response(status_code=204, headers={"HX-Redirect": where})
        return RedirectResponse(where, 303)


Endpoint = Callable[[Visit], Awaitable[Response]]


class ConsolePage:
    """A page below `/console/NAME`, with all of its routes.

    `notices` are the sentences that it shows after a redirect, by their keys. `listed` is whether the
    navigation has it.
    """

    def __init__(
        self,
        name: str,
        title: str,
        *,
        notices: Mapping[str, str] | None = None,
        listed: bool = True,
    ) -> None:
        self.name = name
        self.title = title
        self.notices = notices or {}
        self.listed = listed
        self.routes: list[tuple[str, str, Endpoint, bool]] = []
        """Method, path, endpoint, and whether viewers may call it."""

    def get(self, path: str = "") -> Callable[[Endpoint], Endpoint]:
        """Have the decorated function answer `GET /console/NAME` and `path`."""
        return self._route("GET", path, for_viewers=True)

    def post(self, path: str = "", *, for_viewers: bool = False) -> Callable[[Endpoint], Endpoint]:
        """Have the decorated function answer a form of an admin, or of viewers if it changes nothing."""
        return self._route("POST", path, for_viewers=for_viewers)

    def _route(
        self, method: str, path: str, *, for_viewers: bool
    ) -> Callable[[Endpoint], Endpoint]:
        def add(endpoint: Endpoint) -> Endpoint:
            self.routes.append((method, f"/{self.name}{path}", endpoint, for_viewers))
            return endpoint

        return add
