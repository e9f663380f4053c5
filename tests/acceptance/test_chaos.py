"""The fault test, briefly: each kind of fault once. `make chaos` runs it for ten minutes.

All the while `/readyz` and `penstock status` are compared with what moves, by tests/chaos/witness.py.
"""

from __future__ import annotations

import pytest

from ..chaos.session import Session
from ..chaos.workloads import Outbox

# Each fault alone may take long to be got over on a busy machine.
pytestmark = pytest.mark.timeout(3600)

# In an order in which a start of Spark is waited for as seldom as may be.
FAULTS = [
    "NATS: SIGKILL",
    "Postgres: fast restart",
    "Postgres: walsenders terminated",
    "configuration: changed",
    "pipeline: SIGKILL to a Python worker",
    "Postgres: immediate restart",
    "store: SIGKILL",
    "pipeline: SIGKILL to the capture",
    "pipeline: Python workers stalled",
    "Postgres: SIGKILL",
    "store: away",
    "NATS: stalled",
    "pipeline: SIGKILL to the JVM",
    "pipeline: SIGKILL to the whole tree",
]


def test_nothing_is_lost_twice_or_out_of_order_whatever_is_killed() -> None:
    outcome = Session(duration=60, seed=20, faults=FAULTS).run()
    assert outcome.passed, f"{outcome.verdict.examples}\n{outcome.log_tail}"
    assert set(outcome.recoveries) == set(FAULTS)
    assert outcome.verdict.committed == outcome.verdict.delivered > 1000
    assert outcome.starts >= 3
    assert outcome.reports > 100


# What only an outbox has: a standby and a slot that may be lost. Restarts under a relay are tested in
# test_relay_life.py.
OUTBOX_FAULTS = [
    "Postgres: slot dropped",
    "pipeline: SIGKILL to a Python worker",
    "pipeline: SIGKILL to the whole tree",
]


def test_an_outbox_is_relayed_once_and_in_order_whatever_is_killed() -> None:
    # It writes for as long as the faults last, which may be three seconds.
    outcome = Session(duration=60, seed=5, faults=OUTBOX_FAULTS, rate=900, workload=Outbox()).run()
    assert outcome.passed, f"{outcome.verdict.examples}\n{outcome.log_tail}"
    assert set(outcome.recoveries) == set(OUTBOX_FAULTS)
    assert outcome.verdict.committed == outcome.verdict.delivered > 1000
    assert outcome.starts >= 3
