"""Invariants of our YAML: what is written is read again as it was, by readers of version 1.1 too, whatever it looks like."""

import math

import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from rubato.runtime.config.yaml_core import dump_yaml, read_yaml

LOOKS = (
    "no", "Yes", "on", "OFF", "y", "null", "~", "", "true", "False", "010", "08", "0o17", "0x1F", "0b1", "1_000", "12:30:00", "1:30",
    "2026-11-25", "2026-11-25T10:00:00Z", "1e3", "5e-4", ".5", "1.", "+1", ".inf", "-.INF", ".nan", "<<", "=", "*x", "&x", "!x", "!!str x",
    "a: b", "a #b", "- a", "? a", "[", "{a", "|", ">", "%x", "@x", "`x", "---", "...", " x", "x ", "\tx", "a\nb", "a\n\n b\n", "'", '"',
    "\\", "\x00", "\x07", "\x85", "\u2028", "\u2029", "\ufeff", "\U0001f600", "é", "[::1]:9108", "${A}", "$${A}", "a\r\nb",
)  # fmt: skip
TEXTS = st.sampled_from(LOOKS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(SCALARS, inner, max_size=4), max_leaves=12)


def typed(value):
    """`value` with the type of each part beside it: 1, 1.0 and true are one value for Python."""
    if isinstance(value, dict):
        return {(type(key), key): typed(inner) for key, inner in value.items()}
    return [typed(inner) for inner in value] if isinstance(value, list) else (type(value), value)


@given(VALUES)
@example({"a": math.inf, "b": -math.inf})
@example({look: look for look in LOOKS})
def test_what_is_dumped_is_read_again_as_the_same_values_of_the_same_types(value):
    text = dump_yaml({"value": value})

    found = read_yaml(text)

    assert typed(found) == typed({"value": value})


@given(st.dictionaries(TEXTS, TEXTS, max_size=4))
@example({look: look for look in LOOKS})
def test_text_that_is_dumped_is_the_same_text_for_a_reader_of_version_1_1(texts):
    dumped = dump_yaml(texts)

    assert yaml.safe_load(dumped) == texts


def test_nan_is_read_again_as_nan():
    assert math.isnan(read_yaml(dump_yaml({"x": math.nan}))["x"])
