"""The YAML of an export is what PyYAML writes, whatever the values."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.yaml_lines import parse
from penstock.desired import yaml_text
from penstock.desired.yaml_text import yaml_of

ODD = ["on", "No", "1", "1_0", "_1", "0x1", "~", "<<", "=", "a:", "a/:b", "http://a/b", "x" * 130]
BLOCKS = ["\n", "a\n", "a\n\n", "\na", "a\n b", "- a\n- b", "\n\u2028", "a\u2028\n", "a \n"]
texts = st.one_of(
    st.sampled_from([*ODD, *BLOCKS]),
    st.text("aZ1 \n\t:/-#'\"\x85\u2028\u2029{}[]&*!|>%@`,?\N{SNOWMAN}", max_size=8),
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts


def values_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)


documents = st.dictionaries(texts, st.recursive(scalars, values_of, max_leaves=12), max_size=4)


@settings(max_examples=300)
@given(root=documents)
def test_it_is_what_pyyaml_writes(root: dict[str, Any]) -> None:
    written = yaml.dump(
        root, Dumper=yaml_text._Dumper, sort_keys=False, allow_unicode=True, width=10_000
    )
    text = yaml_of(root)
    # The end of a document may be written where it need not be.
    assert text.removesuffix("...\n") == written.removesuffix("...\n")
    read = parse(written, {})
    assert parse(f"{text}\n# A comment.\n", {}).value == read.value


@pytest.mark.parametrize("block", BLOCKS)
def test_a_comment_behind_a_block_is_no_part_of_it(block: str) -> None:
    written = yaml.safe_load(f"{yaml_of({'a': {'b': block}})}\n# A comment.\n")
    assert written == {"a": {"b": block}}


def test_keys_that_are_no_texts() -> None:
    root = {"conf": {1: "a", None: "b", "c": {2.5: "d"}}}
    assert yaml.safe_load(yaml_of(root)) == root
