"""A job that a lane has, as the scheduler sees it. Pure, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.syncs.jobs import Job, PageDone
from penstock.syncs.progress import CollectionRun


@dataclass(slots=True)
class Flight:
    """A job that a lane has.

    Attributes:
        slice: Its number in the run, None while it plans.
        since: When it began, or reached the newest page behind which it can go on: what it has done
            since would be lost with it.
        yields: Whether it is asked to end where it can go on.
        stops: Whether it is asked to end behind any page.
        has_moved: Whether it has reached such a page.
    """

    job: Job
    lane: int
    run: CollectionRun
    slice: int | None
    credential: str
    since: float
    yields: bool = False
    stops: bool = False
    has_moved: bool = False

    def end(self, *, stops: bool) -> bool:
        """Have it end; return whether a lane is to be asked for that."""
        if self.stops or (self.yields and not stops):
            return False
        self.yields, self.stops = True, stops
        return True

    def note(self, page: PageDone, now: float) -> None:
        """Take a page of its slice."""
        assert self.run.slices is not None  # noqa: S101 - a job of a slice comes from a plan
        assert self.slice is not None  # noqa: S101 - as above
        if page.resume not in (None, self.run.slices[self.slice].resume):
            self.since, self.has_moved = now, True
        self.run.note(self.slice, page)
