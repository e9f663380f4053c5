"""What a session is set to, by its master; what a user sets counts before it."""

from __future__ import annotations

from penstock.spark.settings import SETTINGS, settings_of

BEATS = "spark.executor.heartbeatInterval"


def test_a_local_session_has_few_heartbeats_and_a_cluster_those_of_spark() -> None:
    local = settings_of("local[2]")
    assert local[BEATS] == "60s"
    assert local["spark.driver.host"] == "127.0.0.1"
    cluster = settings_of("spark://host:7077")
    assert {*cluster} == {*SETTINGS}


def test_what_a_user_sets_counts() -> None:
    own = {BEATS: "7s", "spark.driver.host": "::1", "spark.ui.enabled": "true"}
    assert settings_of("local[*]", own).items() >= own.items()
