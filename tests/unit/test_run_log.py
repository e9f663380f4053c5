"""The log of runs, without a run."""

from __future__ import annotations

from structlog.testing import capture_logs

from penstock.runtime.run_log import RunLog


def test_a_dead_letter_is_of_a_sink_or_a_consumer() -> None:
    letter = {"code": "too_large", "reason": "2 MiB", "idempotency_key": "k"}
    with capture_logs() as logs:
        for name in ("out", "mail"):
            RunLog().report({"sink": name, "dead": [letter]}, {"mail"})
    about = {**letter, "event": "dead letter", "log_level": "error"}
    assert logs == [{**about, "sink": "out"}, {**about, "consumer": "mail"}]
