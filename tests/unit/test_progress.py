"""Invariant 1: what may be confirmed, against a model that knows every message's fate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.message import Position
from penstock.postgres.progress import SlotProgress

# A transaction is the number of its messages that are ours; it takes 10 of WAL and ends 4 later.
transactions = st.lists(st.integers(0, 3), min_size=1, max_size=8)


class Server:
    """Sends transactions from wherever the slot is, and may be interrupted anywhere."""

    def __init__(self, counts: list[int], start: Position) -> None:
        self.begins = [(10 * (i + 1), count) for i, count in enumerate(counts)]
        self.progress = SlotProgress(start)
        self.read = start
        self.reported = 0
        self.at = 0, 0  # the transaction under way, and its messages sent

    def step(self) -> None:
        """Send one message: a begin, a change, a commit, or a keepalive at the end."""
        index, sent = self.at
        if index >= len(self.begins):
            self.progress.received(10 * (len(self.begins) + 1))
            return
        lsn, count = self.begins[index]
        if sent == 0:
            self.progress.received(lsn - 3)
            self.progress.begin(lsn)
        if sent < count:
            self.read = max(self.read, Position(lsn, sent))
            self.at = index, sent + 1
            # What a keepalive says inside a transaction is not to be believed.
            self.progress.received(lsn + 4)
        else:
            self.progress.commit(*self.read, lsn + 4)
            self.at = index + 1, 0

    def reconnect(self) -> None:
        self.progress.interrupted()
        flush = self.progress.flush_lsn
        self.at = sum(lsn < flush for lsn, _ in self.begins), 0

    def check(self, durable: Position) -> None:
        flush = self.progress.flush_lsn
        for lsn, count in self.begins:
            if count and Position(lsn, count - 1) > durable:
                assert flush <= lsn, f"{lsn} is not durable, and the slot is at {flush}"
        assert flush >= self.reported, "a slot does not go back"
        self.reported = flush


@given(transactions, st.data())
def test_never_past_what_is_not_durable(counts: list[int], data: st.DataObject) -> None:
    start = Position(*data.draw(st.sampled_from([(0, -1), (10, 0), (20, 1)])))
    server = Server(counts, start)
    durable = start
    for _ in range(data.draw(st.integers(1, 40))):
        step = data.draw(st.sampled_from(["step"] * 6 + ["confirm", "confirm", "reconnect"]))
        if step == "step":
            server.step()
        elif step == "reconnect":
            server.reconnect()
        else:
            known = [
                Position(lsn, i)
                for lsn, count in server.begins
                for i in range(count)
                if durable <= Position(lsn, i) <= server.read
            ]
            if known:
                durable = data.draw(st.sampled_from(known))
                server.progress.confirm(durable)
        server.check(durable)
    # And nothing is held for ever: once all is durable, all is confirmed.
    while server.at[0] < len(counts):
        server.step()
        server.check(durable)
    server.step()
    server.progress.confirm(server.read)
    assert server.progress.flush_lsn == 10 * (len(counts) + 1)


def test_the_time_of_what_is_confirmed() -> None:
    """It is that of a transaction that is durable as a whole, also where the clock went back."""
    progress = SlotProgress(Position(0, -1))
    for lsn, time in ((10, 500), (20, 400), (30, 900)):
        progress.begin(lsn)
        progress.commit(lsn, 0, lsn + 4, time)
    assert progress.flush_time == 0
    assert progress.confirm(Position(20, 0)) == (2, 1000)
    assert progress.confirm(Position(20, 0)) == (0, 0)
    assert (progress.flush_lsn, progress.flush_time) == (24, 500)
    progress.confirm(Position(30, 0))
    assert (progress.flush_lsn, progress.flush_time) == (34, 900)
    progress.begin(40)  # a transaction without messages of ours
    progress.commit(30, 0, 44, 950)
    assert (progress.flush_lsn, progress.flush_time) == (44, 950)
