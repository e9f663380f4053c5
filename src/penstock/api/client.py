"""The client of a request, as far as an endpoint needs to know it beside ASGI."""

from __future__ import annotations

from collections.abc import Callable

from fastapi.responses import Response


class Client:
    """What a request finds in `state["client"]`. This one never hangs up, and needs ASGI to answer."""

    @property
    def gone(self) -> bool:
        """Whether what is written now is lost."""
        return False

    def watch(self, hang_up: Callable[[], None] | None) -> None:
        """Have `hang_up` called when the client hangs up before its answer; None ends that."""

    def answer(self, response: Response) -> bool:  # noqa: ARG002 - of one that is connected
        """Write the whole answer at once; return False where it has to be sent through ASGI."""
        return False
