"""The AOT cache's files: which one is given to a JVM, and which never is."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.core import caches
from penstock.spark import aot
from penstock.spark.java import Java

KEY = "0123456789abcdef0123"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caches.folder().mkdir()
    return tmp_path / "penstock"


def cache(folder: Path, content: bytes = b"classes" * 1000) -> Path:
    path = folder / "made"
    path.write_bytes(content)
    return path.rename(folder / f"{KEY}-{aot.digest(path)}.aot")


def test_a_whole_one_is_found(folder: Path) -> None:
    assert aot.find(KEY) is None
    assert not aot.is_there(KEY)
    path = cache(folder)
    assert aot.find(KEY) == path
    assert aot.is_there(KEY)
    assert aot.find("f" * 20) is None


@pytest.mark.parametrize("at", [0, 3500, 6999])
def test_a_damaged_one_is_deleted(folder: Path, at: int) -> None:
    path = cache(folder)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"X")
    assert aot.find(KEY) is None
    assert not path.exists()


def test_a_half_written_one_is_deleted(folder: Path) -> None:
    path = cache(folder)
    os.truncate(path, 3500)
    assert aot.find(KEY) is None
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_one_that_another_user_has_made_is_not_used(folder: Path) -> None:
    path = cache(folder)
    os.chown(path, 12345, 12345)
    assert aot.find(KEY) is None


def test_a_folder_that_can_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert aot.find(KEY) is None
    assert not aot.is_there(KEY)
    assert not aot.make_in_background(KEY)


def test_the_key_is_that_of_java_jars_and_options(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    java = Java(tmp_path / "bin" / "java", "a test")
    release = tmp_path / "release"
    release.write_text('JAVA_VERSION="25.0.2"\n')
    jar = tmp_path / "one.jar"
    jar.write_text("1")

    def key(*options: str) -> str:
        return aot.key(java, [jar], options)

    assert java.major == 25
    first = key("-XX:+UseSerialGC")
    assert key("-XX:+UseSerialGC") == first
    assert key("-XX:+UseG1GC") != first
    jar.write_text("22")
    second = key("-XX:+UseSerialGC")
    assert second != first
    release.write_text('JAVA_VERSION="25.0.3"\n')
    assert key("-XX:+UseSerialGC") not in (first, second)


def test_what_is_stale_or_unfinished_goes(folder: Path) -> None:
    used, unused = cache(folder), cache(folder, b"other")
    (folder / "unfinished-1.aot").touch()
    (folder / "unfinished-1.aot.config").touch()
    (folder / "lock").touch()
    os.utime(unused, (0, time.time() - 31 * 86_400))
    aot.tidy()
    assert sorted(path.name for path in folder.iterdir()) == [used.name, "lock"]


def test_the_background_tries_again_an_hour_after_a_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(a))
    assert aot.make_in_background(KEY)
    assert aot.make_in_background(KEY)  # one that was killed has written nothing
    log = aot.log_path(KEY)
    log.write_text("No cache can be made")
    assert not aot.make_in_background(KEY)
    os.utime(log, (0, time.time() - 3700))
    assert aot.make_in_background(KEY)
    assert len(started) == 3
