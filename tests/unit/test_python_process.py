"""Python transforms in a process of their own: one that never ends, or ends it, stops no other."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pyarrow as pa
import pytest
from tests.streams_help import inserted, wire

from penstock import transforms
from penstock.check import expressions
from penstock.config.settings import Config
from penstock.config.sinks import NatsSinkSettings
from penstock.config.sources import PostgresSource
from penstock.config.transforms import TransformSettings
from penstock.transforms import isolated
from penstock.transforms.base import TransformError
from penstock.transforms.python_process import PythonProcess
from penstock.trial.trial import Trial

MODULE = """
import os

def never_ends(message):
    while message["record"]["id"] == 1:
        pass
    message["record"]["seen"] = os.getpid()
    return message

def ends_all(message):
    os._exit(3)

def prints(message):
    print("no frame of the pipe")
    return message

def fails(message):
    raise ValueError("no")
"""
FOREVER = "while True:\n    pass\n"
SECONDS = 4.0


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_apart.py").write_text(MODULE)
    (tmp_path / "shop_forever.py").write_text(FOREVER)
    monkeypatch.syspath_prepend(str(tmp_path))


def one(number: int) -> pa.RecordBatch:
    return wire([inserted(number)])


def made(function: str) -> PythonProcess:
    return PythonProcess(f"shop_apart:{function}", message_seconds=SECONDS)


def test_one_that_never_ends_is_killed_and_named_and_others_go_on() -> None:
    transform = made("never_ends")
    process = psutil.Process(transform._process.pid)
    (failed,) = transform(one(1)).failed
    assert failed.reason == (
        "shop_apart:never_ends did not end within 4 s, and was killed: a pipeline would wait for it"
        " for ever"
    )
    assert not process.is_running()
    done = transform(one(2))
    assert not done.failed
    assert '"seen":' in done.batch.column("record")[0].as_py()
    transform.close()


def test_one_that_ends_its_process_fails_alone() -> None:
    transform = made("ends_all")
    (failed,) = transform(one(1)).failed
    assert failed.reason == "shop_apart:ends_all ended its process, with the exit code 3"
    transform.close()


@pytest.mark.parametrize("function", ["prints", "fails"])
def test_it_does_what_one_in_this_process_does(function: str) -> None:
    apart = made(function)
    here = transforms.make(TransformSettings(python=f"shop_apart:{function}"))
    assert apart(one(1)) == here(one(1))
    apart.close()


@pytest.mark.parametrize("spec", ["shop_apart:nothing", "shop_nowhere:f", "shop_apart:os"])
def test_what_cannot_be_loaded_is_named_alike(spec: str) -> None:
    with pytest.raises(TransformError) as here:
        transforms.make(TransformSettings(python=spec))
    with pytest.raises(TransformError) as apart:
        isolated(TransformSettings(python=spec))
    assert str(apart.value) == str(here.value)


def test_an_import_that_never_ends() -> None:
    started = time.monotonic()
    with pytest.raises(TransformError, match="the import of its module did not end within 1 s"):
        PythonProcess("shop_forever:f", load_seconds=1.0)
    assert time.monotonic() - started < 30


def test_without_the_other_process_it_ends_by_itself() -> None:
    transform = PythonProcess("shop_apart:never_ends", message_seconds=0.5)
    process = psutil.Process(transform._process.pid)
    transform._pipe.send(one(1))  # and wait for no answer
    assert process.wait(timeout=60) == 1
    transform.close()


def test_a_trial_goes_on_behind_one_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PythonProcess.__init__, "__kwdefaults__",
                        {"message_seconds": SECONDS, "load_seconds": 30.0})  # fmt: skip
    sink = {
        "type": "nats", "source": "shop", "subject": "s.{table}",
        "transform": {"python": "shop_apart:never_ends"},
    }  # fmt: skip
    source = {"type": "postgres", "url": "postgresql://u@localhost/shop"}
    config = Config(
        sources={"shop": PostgresSource.model_validate(source)},
        sinks={"out": NatsSinkSettings.model_validate(sink)},
    )
    trial = Trial(config, "out", lambda _: None)
    (stuck,), (sent,) = list(trial(one(1))), list(trial(one(2)))
    trial.close()
    assert (stuck.result, stuck.code) == ("failed", "transform_failed")
    assert "did not end within 4 s" in stuck.why
    assert sent.result == "sent"


def test_a_check_is_not_blocked_by_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PythonProcess.__init__, "__kwdefaults__",
                        {"message_seconds": SECONDS, "load_seconds": 1.0})  # fmt: skip
    settings = {
        "type": "nats", "source": "shop", "subject": "s.{table}",
        "transform": {"python": "shop_forever:f"},
    }  # fmt: skip
    sink = NatsSinkSettings.model_validate(settings)
    of_source = MagicMock(columns={}, tables=(), identities={})
    finding = next(iter(expressions._of_sink("out", sink, of_source)))
    assert "the import of its module did not end within 1 s" in finding.message
