"""The claims of a run: none of them outlives it."""

from __future__ import annotations

import threading

import pytest

from penstock.streams import claim as claims
from penstock.streams.claim import Claim, Claims


class SlowClaim(Claim):
    """A claim whose session is lost, and whose next one takes a while."""

    def __init__(self) -> None:
        super().__init__("", 0)
        self.begun, self.go_on, self.ended = (threading.Event() for _ in range(3))
        self.held = False

    def acquire(self) -> bool:
        self.begun.set()
        self.go_on.wait(60)
        self.held = True
        return True

    def close(self) -> None:
        self.held = False
        if self.go_on.is_set():
            self.ended.set()


def test_a_claim_that_is_made_again_while_the_run_ends_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claims, "_STOP_SECONDS", 0.1)
    claim, kept = SlowClaim(), Claims(lambda *_: None)
    kept.add("shop", claim)
    assert claim.begun.wait(60)
    kept.close()
    claim.go_on.set()
    assert claim.ended.wait(60)
    assert not claim.held
