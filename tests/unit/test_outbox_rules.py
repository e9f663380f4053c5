"""The lists that the printed SQL has from Python: complete, and the same on each machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from penstock.expressions import vocabulary
from penstock.expressions.functions import FUNCTIONS
from penstock.outbox.config_keys import KEYS
from penstock.outbox.sql import rules
from penstock.outbox.sql.install import DIGEST, script


def test_the_script_has_no_placeholder() -> None:
    names = re.compile(r"\{(?:condition|metadata|config)_\w+\}|\{(?:secrets|paths|batch_size)\}")
    assert not names.findall(script())
    assert all(name not in script() for name in rules._VALUES)


def test_the_script_has_all_keys_and_words() -> None:
    printed = script()
    for key in KEYS:
        assert f"'{key.name}', '{key.kind}', {rules.literal(key.expected)}" in printed, key.name
    words = {word for name in vocabulary.TYPES for word in name.split()}
    for word in (*FUNCTIONS, *vocabulary.KEYWORDS, *vocabulary.METADATA, *words):
        assert f"'{word}'" in printed, word


def test_the_script_is_the_same_in_each_process() -> None:
    """Sets have another order where strings have other hashes; the digest must not depend on it."""
    code = "from penstock.outbox.sql.install import DIGEST; print(DIGEST)"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == DIGEST


def test_a_literal_is_what_postgres_reads() -> None:
    assert rules.literal("it's \\") == "'it''s \\'"
    assert (rules.literal(None), rules.literal(True)) == ("NULL", "true")
