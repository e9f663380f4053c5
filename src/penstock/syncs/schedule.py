"""What is read when, and by which lane: the scheduler of all syncs. Pure, no I/O.

Each collection of a sync is one entry of a heap, and costs nothing while nothing of it is due. What is
due waits in the queue of its credential until a lane has room and the credential may have one more
request under way. Times are Unix time, and come from the caller.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from penstock.syncs.entry import FIRST, Entry
from penstock.syncs.flight import Flight
from penstock.syncs.jobs import Ended, Job, PageDone, Planned, Report
from penstock.syncs.lane_room import LaneRoom
from penstock.syncs.progress import CollectionProgress, CollectionRun
from penstock.syncs.queue import Queue, place_of
from penstock.syncs.sync import Key, SyncSettings


class Scheduler:
    """Decides for all syncs.

    Args:
        slots: How many jobs a lane runs at a time.
        concurrency: Returns how many requests a credential may have under way.
        first_number: The number of its first job; greater than that of any earlier scheduler's.
    """

    def __init__(
        self, slots: int, concurrency: Callable[[str], int], first_number: int = 1
    ) -> None:
        self._concurrency = concurrency
        self._number = first_number
        self._entries: dict[Key, Entry] = {}
        self._leaving: dict[Key, Entry] = {}
        self._of_sync: dict[str, list[Entry]] = {}
        self._heap: list[tuple[float, int, int, Key]] = []
        self._pushes = 0
        self._queues: OrderedDict[str, Queue] = OrderedDict()
        self._room = LaneRoom(slots)
        self._flights: dict[int, tuple[Entry, Flight]] = {}
        self._yields: list[tuple[int, int]] = []
        self._stops: list[tuple[int, int]] = []
        self._dirty: dict[Key, Entry] = {}
        self._paused = False

    # -- what others see

    @property
    def idle(self) -> bool:
        """Whether no lane has a job."""
        return not self._flights

    @property
    def progresses(self) -> Iterator[tuple[SyncSettings, CollectionProgress]]:
        """All collections of all syncs."""
        return ((entry.sync, entry.progress) for entry in self._entries.values())

    def entry(self, key: Key) -> Entry | None:
        """Return a collection of a sync, to look at."""
        return self._entries.get(key)

    # -- settings and commands

    def configure(
        self, syncs: Iterable[SyncSettings], known: Mapping[Key, CollectionProgress], now: float
    ) -> None:
        """Run these syncs from now on; `known` is what is stored of their collections.

        A collection that was added begins with its backfill, one that was removed ends.
        """
        syncs = list(syncs)
        wanted = {(sync.id, collection): sync for sync in syncs for collection in sync.collections}
        for key in [key for key in self._entries if key not in wanted]:
            self._leaving[key] = gone = self._entries.pop(key)
            gone.removed = True
            self._end_jobs(gone, stops=True)
        for key, sync in wanted.items():
            entry: Entry | None = self._entries.get(key)
            left = self._leaving.pop(key, None)
            if left is not None and left.flights:  # it had not ended yet
                self._entries[key] = entry = left
                entry.removed = False
            if entry is None:
                progress = known.get(key) or CollectionProgress(sync=key[0], collection=key[1])
                self._entries[key] = entry = Entry(sync, progress)
                self._note(entry)
            elif entry.sync != sync:
                entry.sync = sync
                entry.forget_credential()
                entry.try_again(now)
                self._note(entry)
            else:
                continue
            self._look(entry, now)
        self._leaving = {key: of for key, of in self._leaving.items() if of.flights}
        self._of_sync = {}
        for entry in self._entries.values():
            self._of_sync.setdefault(entry.key[0], []).append(entry)
        for sync in syncs:
            self._check_blocked(sync.id, now)

    def run_now(self, sync: str, collection: str | None, now: float) -> None:
        """Poll now, whatever the frequency."""
        self._command(sync, collection, now, Entry.run_now)

    def backfill(self, sync: str, collection: str | None, now: float) -> None:
        """Read a collection, or all of a sync, from the beginning."""
        self._command(sync, collection, now, Entry.start_backfill)

    def resume(self, sync: str, collection: str | None, now: float) -> None:
        """Go on after a question, or with the credential as it is."""
        self._command(sync, collection, now, Entry.resume)

    def _command(
        self, sync: str, collection: str | None, now: float, do: Callable[[Entry, float], None]
    ) -> None:
        for entry in self._of_sync.get(sync, ()):
            if collection in (None, entry.key[1]):
                do(entry, now)
                self._note(entry)
                self._look(entry, now)
        self._check_blocked(sync, now)

    def _check_blocked(self, sync: str, now: float) -> None:
        """Stop all of a sync where the credential fails, and let it go on where it does no longer."""
        entries = self._of_sync.get(sync, ())
        blocked = any(entry.waits_for_credential for entry in entries)
        for entry in entries:
            if entry.blocked != blocked:
                entry.blocked = blocked
                self._look(entry, now)

    # -- lanes

    def join(self, lane: int) -> None:
        """Note a lane that takes jobs."""
        self._room.join(lane)

    def lose(self, lane: int, now: float) -> None:
        """Note that a lane is gone: what it had is given to others, from the last page written."""
        self._room.lose(lane)
        for number, (entry, flight) in list(self._flights.items()):
            if flight.lane == lane:
                self._land(number)
                entry.was_cut = not flight.has_moved
                self._look(entry, now)

    def pause(self) -> None:
        """Hand nothing out, and end all jobs between two pages."""
        self._paused = True
        for entry, _ in list(self._flights.values()):
            self._end_jobs(entry, stops=True)

    def make_room(self) -> None:
        """End all jobs where they can go on; those that are handed out from now on go on."""
        for entry, _ in list(self._flights.values()):
            self._end_jobs(entry, stops=False)

    def go(self) -> None:
        """Hand jobs out again."""
        self._paused = False

    def hand_out(self, now: float) -> list[tuple[int, Job]]:
        """Return the jobs that lanes are to be sent."""
        given: list[tuple[int, Job]] = []
        while True:
            while self._heap and self._heap[0][0] <= now:
                _, _, version, key = heapq.heappop(self._heap)
                entry = self._entries.get(key)
                if entry is not None and entry.version == version:
                    self._consider(entry, now)
            found = [] if self._paused or not self._room.has_any else self._round(now)
            given += found
            if not found and not (self._heap and self._heap[0][0] <= now):
                break
        for name in [name for name, queue in self._queues.items() if queue.is_idle]:
            del self._queues[name]
        return given

    def yields(self) -> list[tuple[int, int]]:
        """Return, once, which lanes' jobs are to end where they can go on."""
        found, self._yields = self._yields, []
        return found

    def stops(self) -> list[tuple[int, int]]:
        """Return, once, which lanes' jobs are to end between any two pages."""
        found, self._stops = self._stops, []
        return found

    def would_lose(self, since: float) -> bool:
        """Return whether a job has come to no page since then behind which it can go on."""
        return any(flight.since < since for _, flight in self._flights.values())

    def wake_at(self) -> float | None:
        """Return when `hand_out` is due at the latest, if nothing else happens."""
        return self._heap[0][0] if self._heap else None

    @property
    def is_dirty(self) -> bool:
        """Whether there is anything to store."""
        return bool(self._dirty)

    def take_dirty(self) -> list[CollectionProgress]:
        """Return, once, what is to be stored."""
        found = [entry.progress for entry in self._dirty.values()]
        for entry in self._dirty.values():
            entry.storing = entry.must_store
        self._dirty.clear()
        return found

    def stored(self, keys: Iterable[Key], now: float) -> None:
        """Note that what `take_dirty` returned last for these collections is stored."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.stored():
                self._look(entry, now)

    # -- reports

    def report(self, report: Report, now: float) -> None:
        """Take a lane's report; one of a job that it lost is of no use, and does no harm."""
        found = self._flights.get(report.job)
        if found is None:
            return
        entry, flight = found
        self._note(entry)
        if isinstance(report, PageDone):
            entry.page(flight, report, now)
        elif isinstance(report, Planned):
            entry.planned(flight, report, now)
            self._look(entry, now)  # other lanes may read what it has planned
        elif isinstance(report, Ended):
            self._end(entry, flight, report, now)
        else:
            entry.swept(flight, report, now)

    def _end(self, entry: Entry, flight: Flight, report: Ended, now: float) -> None:
        self._land(report.job)
        entry.progress.counts.requests += report.requests
        if report.problem is not None:
            entry.failed(flight, report.problem, now)
            self._check_blocked(entry.key[0], now)
        elif not report.yielded:
            entry.ended(flight, now)
        entry.was_cut = report.yielded and flight.stops and not flight.has_moved
        self._look(entry, now)

    # -- the queues

    def _note(self, entry: Entry) -> None:
        if not entry.removed:
            self._dirty[entry.key] = entry

    def _look(self, entry: Entry, now: float) -> None:
        """Have an entry be considered now, at the next `hand_out`."""
        if entry.removed:
            self._end_jobs(entry, stops=True)
        else:
            self._push(entry, now)

    def _push(self, entry: Entry, at: float) -> None:
        entry.version += 1
        self._pushes += 1
        heapq.heappush(self._heap, (at, self._pushes, entry.version, entry.key))

    def _consider(self, entry: Entry, now: float) -> None:
        had_backfill = entry.progress.backfill
        run = entry.choose(now)
        if entry.progress.backfill is not had_backfill:
            self._note(entry)
        running = entry.running
        if entry.is_unwanted or entry.makes_room(run):
            self._end_jobs(entry, stops=entry.is_unwanted)
        elif run is not None and (running is None or running is run) and entry.next_slice(run)[0]:
            self._queue(entry, run)
        if (at := entry.look_at()) is not None and at > now:
            self._push(entry, at)

    def _queue(self, entry: Entry, run: CollectionRun) -> None:
        if entry.queued == place_of(run):
            return
        if entry.queued is not None:
            self._queues[entry.queued_in].of(entry.queued).remove(entry)
        entry.queued_in = entry.sync.credential
        self._queues.setdefault(entry.queued_in, Queue()).add(entry, run)

    def _end_jobs(self, entry: Entry, *, stops: bool) -> None:
        asked = self._stops if stops else self._yields
        asked += [(of.lane, number) for number, of in entry.flights.items() if of.end(stops=stops)]

    def _round(self, now: float) -> list[tuple[int, Job]]:
        """Hand out one job of each credential, what comes first before all else."""
        given: list[tuple[int, Job]] = []
        for name, queue in list(self._queues.items()):
            most = max(1, self._concurrency(name))
            while queue.first and queue.firsts < most and self._room.has_any:
                if (job := self._hand(name, queue.first, now)) is not None:
                    given.append(job)
                    break
        for name, queue in list(self._queues.items()):
            most = max(1, self._concurrency(name))
            while queue.later and queue.laters < most and self._room.has_any_for_later:
                if (job := self._hand(name, queue.later, now)) is not None:
                    given.append(job)
                    break
        if self._queues:  # each credential is the first one at times
            self._queues.move_to_end(next(iter(self._queues)))
        return given

    def _hand(self, name: str, of: deque[Entry], now: float) -> tuple[int, Job] | None:
        """Give the next entry's job to the lane that has the fewest, unless it has none by now."""
        entry, queue = of.popleft(), self._queues[name]
        entry.queued = None
        if entry.removed:
            return None
        run, running = entry.choose(now), entry.running
        is_there, slice_ = (False, None) if run is None else entry.next_slice(run)
        fits = entry.sync.credential == name and (running is None or running is run)
        if run is None or not is_there or not fits or (run.kind in FIRST) != (of is queue.first):
            self._look(entry, now)  # something else is due by now
            return None
        lane = self._room.take()
        job = entry.take(self._number, lane, run, slice_, now)
        self._flights[self._number] = entry, entry.flights[self._number]
        self._number += 1
        self._room.laters += queue.count(run.kind, 1)
        self._look(entry, now)  # it may have more slices
        return lane, job

    def _land(self, number: int) -> None:
        """Take a job from its lane."""
        entry, flight = self._flights.pop(number)
        del entry.flights[number]
        self._room.leave(flight.lane)
        queue = self._queues.setdefault(flight.credential, Queue())
        self._room.laters += queue.count(flight.run.kind, -1)
