"""What a snapshot sees, what a window collects of the changes around it, and sizes of chunks."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backfill.chunks.sizing import FEWEST, MOST, RANGE_BYTES, Sizing
from penstock.postgres import watermarks
from penstock.postgres.watermarks import Recent, Snapshot, Window, unseen


def test_a_snapshot_is_parsed() -> None:
    assert Snapshot.parse("10:20:12,14") == Snapshot(10, 20, frozenset({12, 14}))
    assert Snapshot.parse("7:7:") == Snapshot(7, 7, frozenset())
    with pytest.raises(ValueError, match="invalid literal"):
        Snapshot.parse("7:x:")


@given(st.data(), st.integers(3, 2**34))
def test_a_snapshot_sees_what_ended_before_it(data: st.DataObject, xmin: int) -> None:
    xmax = xmin + data.draw(st.integers(0, 1000))
    inside = st.integers(xmin, max(xmax - 1, xmin))
    active = frozenset(data.draw(st.sets(inside, max_size=5)) if xmax > xmin else ())
    snapshot = Snapshot(xmin, xmax, active)
    # Any that can still be distinguished from later ones by its 32 bits.
    xid = data.draw(
        st.integers(max(xmax - 2**31, 0), xmax + 2**30) | inside | st.sampled_from([xmax])
    )
    expected = xid < xmax and xid not in active
    assert snapshot.sees(xid & 0xFFFFFFFF) == expected
    assert unseen(snapshot, [xid & 0xFFFFFFFF]) == (set() if expected else {xid & 0xFFFFFFFF})


def test_the_counter_goes_round() -> None:
    snapshot = Snapshot(2**32 - 5, 2**32 + 5, frozenset({2**32 + 1}))
    assert snapshot.sees(2**32 - 6)
    assert snapshot.sees(2**32 - 1)
    assert snapshot.sees(4)
    assert not snapshot.sees(1)
    assert not snapshot.sees(5)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.data())
def test_the_last_transactions_are_remembered(xids: list[int], data: st.DataObject) -> None:
    before = watermarks.RECENT
    watermarks.RECENT = 8  # type: ignore[misc]  # for the test
    try:
        recent = Recent()
        for xid in xids:
            recent.add(xid)
        count = data.draw(st.integers(0, len(xids)))
        assert sorted(recent.since(count)) == sorted(xids[count:][-8:])
    finally:
        watermarks.RECENT = before  # type: ignore[misc]  # for the test


def hashes(found: Window) -> set[int]:
    read = array("q")
    read.frombytes(found.touched())
    return set(read)


def test_a_window_has_only_what_the_snapshot_does_not_see() -> None:
    found = Window()
    found.add(10, [1], None)
    found.add(11, [2, 3], ("k",))
    found.add(12, [4], ("gone",))
    found.set_snapshot(Snapshot(11, 12, frozenset({11})), 11)
    found.add(11, [5], None)
    found.begin(10)
    assert not found.is_open
    found.begin(13)
    assert found.is_open
    found.add(13, [-7], None)
    assert hashes(found) == {2, 3, 4, 5, -7}
    assert found.incomplete() == [("k",), ("gone",)]
    assert not found.everything


@pytest.mark.parametrize("seen", [False, True])
def test_a_truncate_touches_everything_unless_it_is_seen(seen: bool) -> None:
    found = Window()
    found.add(10, None, None)
    found.set_snapshot(
        Snapshot(11, 11, frozenset()) if seen else Snapshot(10, 10, frozenset()), None
    )
    assert found.everything is not seen
    late = Window()
    late.set_snapshot(Snapshot(10, 10, frozenset()), None)
    late.begin(11)
    late.add(11, None, None)
    assert late.everything


def test_too_many_changes_touch_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watermarks, "TOUCHED", 2)
    found = Window()
    for n in range(3):
        found.add(5, [n], None)
    assert found.everything


@given(st.lists(st.tuples(st.floats(0, 30), st.booleans()), max_size=40))
def test_chunks_stay_within_their_bounds(taken: list[tuple[float, bool]]) -> None:
    sizing = Sizing()
    for seconds, live in taken:
        before = sizing.rows
        sizing.took(before, seconds, live=live)
        assert FEWEST <= sizing.rows <= min(MOST, before * (4 if before < 1_000 else 2))


@pytest.mark.parametrize(
    ("live", "fixed", "row", "low", "high"),
    [
        (True, 0.004, 50e-6, 0.002, 0.009),
        (True, 0.02, 200e-6, 0.008, 0.03),
        (False, 0.07, 10e-6, 0.1, 0.3),
    ],
)
def test_chunks_take_about_as_long_as_they_may(
    live: bool, fixed: float, row: float, low: float, high: float
) -> None:
    """The rows, beside what any chunk takes: so many seconds, or as long as that."""
    sizing = Sizing()
    for _ in range(40):
        sizing.took(sizing.rows, fixed + sizing.rows * row, live=live)
    assert low < sizing.rows * row < high


# Seconds of chunks of 20 to 300 rows on a machine with five times as many processes as cores.
BUSY = (
    0.204, 0.151, 0.148, 0.178, 0.131, 0.106, 0.152, 0.138, 0.114, 0.083, 0.202, 0.125, 0.191, 0.153,
    0.247, 0.168, 0.164, 0.145, 0.121, 0.156, 0.136, 0.099, 0.366, 0.28, 0.217, 0.106, 0.062, 0.054,
)  # fmt: skip


def test_a_busy_machine_does_not_make_chunks_small() -> None:
    """What takes long there are not the rows."""
    sizing, rows = Sizing(), []
    for seconds in BUSY * 3:
        rows.append(sizing.rows)
        sizing.took(sizing.rows, seconds + sizing.rows * 20e-6, live=True)
    assert sum(rows) / len(rows) > 100, rows


@given(st.floats(0, 2e9))
def test_a_range_stays_light(row_bytes: float) -> None:
    sizing = Sizing()
    for _ in range(12):
        sizing.weighed(row_bytes)
        assert sizing.rows >= 1
        assert sizing.rows == 1 or sizing.rows * row_bytes <= RANGE_BYTES
        sizing.took(sizing.rows, 0.05, live=False)
    light = sizing.rows
    sizing.weighed(None)
    assert sizing.rows == light, "there is no row to be weighed"
    sizing.weighed(1.0)
    assert sizing.rows >= light
