"""The errors of consumers: what their codes are, and that they travel between processes."""

from __future__ import annotations

import pickle

from penstock.streams.consumers.types import ConsumerError

CODES = {
    "name_taken", "no_consumer", "no_dead_letter", "no_stream", "refused", "store_unavailable",
    "too_many_waiting", "wrong_setting",
}  # fmt: skip


def test_codes_are_stable_words() -> None:
    found = {kind: kind("It is so.") for kind in ConsumerError.__subclasses__()}
    assert {error.code for error in found.values()} == CODES
    assert len(found) == len(CODES)
    for kind, error in found.items():
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), copy.code, str(copy)) == (kind, error.code, "It is so.")
