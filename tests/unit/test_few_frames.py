"""The frames of a few rows are those that the kernels make, byte for byte."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.nats import NatsSinkConfig
from penstock.core.message import WIRE_SCHEMA
from penstock.sinks.nats import frames
from penstock.sinks.nats.few_frames import MAX_HEADER
from penstock.sinks.nats.frames import Encoder, FrameBlock

INBOX = b"_INBOX.a."
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
ROWS = st.fixed_dictionaries(
    {
        "record": st.none() | TEXT,
        "changes": st.none() | TEXT,
        "action": st.sampled_from(["insert", "update", "delete", "truncate"]),
        "table_schema": TEXT,
        "table_name": TEXT | st.just("x" * 9_000),
        "metadata": st.none()
        | st.sampled_from(
            [
                "{}",
                '{"record_pks":[7],"unavailable":[]}',
                '{"a":1}',
                ' {"a":1} ',
                "{ }",
                '{"a":1}\u2003',
                '{"unavailable":[]}',
            ]
        )
        | TEXT.map('{{"t":"{}"}}'.format),
        "idempotency_key": TEXT | st.just("k" * MAX_HEADER) | st.just("a\nb"),
    }
)


def shown(block: FrameBlock) -> tuple[Any, ...]:
    return (
        block.first, block.rows, bytes(block.data), list(block.offsets), list(block.payload),
        block.largest, block.refused, block.body_bytes,
    )  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kind": "rows", "subject": "{table}.{key}"},
        {"stream": "SHOP", "subject": "{source}.{schema}.{table}"},
    ],
)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=12),
    first=st.integers(0, 3),
    base=st.sampled_from([1, 999_999]),
)
def test_they_are_the_same(
    settings: dict[str, str], rows: list[dict[str, Any]], first: int, base: int
) -> None:
    config = NatsSinkConfig.model_validate({"url": "nats://h:4222", **settings})
    encoder = Encoder(config, "orders", "shop", INBOX)
    first = min(first, len(rows) - 1)
    batch = pa.RecordBatch.from_pylist([{"part": 0, **row} for row in rows], schema=WIRE_SCHEMA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "FEW", 0)
        by_kernels = shown(encoder.block(batch, first, base))
    assert shown(encoder.block(batch, first, base)) == by_kernels
