"""Numbers of JSON keep their digits in the console."""

from __future__ import annotations

import pytest

from penstock.api.console import exact
from penstock.api.console.render import pretty


@pytest.mark.parametrize(
    "text",
    [
        "1.10", "100", "-1.0E-5", "1e400", "123456789012345678901234567890", "18446744073709551615",
        "-9223372036854775809", '["\\ud83d\\ude00"]',
    ],
)  # fmt: skip
def test_a_number_is_written_as_it_was_read(text: str) -> None:
    if text.startswith("["):
        assert exact.dumps(exact.loads(text)) == '["\N{GRINNING FACE}"]'
    else:
        assert exact.dumps(exact.loads(text)) == pretty(exact.loads(text)) == text


def test_a_number_calculates() -> None:
    assert exact.loads("1.10") + exact.loads("2") == pytest.approx(3.1)
    assert exact.loads("9223372036854775807") == (1 << 63) - 1


@pytest.mark.parametrize("text", ["", "NaN", "[-Infinity]", '"\\ud800"', "{"])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        exact.loads(text)
