"""YAML 1.2's core schema: what is text stays text, and what is not YAML is said in one sentence."""

import math

import pytest

from rubato.runtime.config.overrides import given
from rubato.runtime.config.yaml_core import MAX_CHARS, MAX_VALUES, NotYaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((text, text) for text in ("12:30:00", "1:30", "no", "Yes", "on", "OFF", "y", "2026-11-25", "1_000", "0b1", "=", "<<", "-0o17")),
        ("010", 10), ("08", 8), ("0o17", 15), ("0x1F", 31), ("+1", 1), ("1e3", 1000.0), ("5e-4", 5e-4), (".5", 0.5), ("1.", 1.0),
        (".inf", math.inf), ("-.INF", -math.inf), ("~", None), ("null", None), ("true", True), ("FALSE", False), ("tRue", "tRue"),
        ("{on: off, 1: a, '1': b}", {"on": "off", 1: "a", "1": "b"}), ('"\\ud83d\\ude00"', "\U0001f600"), ("!!str 010", "010"),
        ("{<<: {a: 1, b: 1}, a: 2}", {"a": 2, "b": 1}), ("[&x {a: 1}, *x]", [{"a": 1}, {"a": 1}]),
    ],
)  # fmt: skip
def test_a_value_is_what_the_core_schema_says(text, value):
    found = read_yaml(text)

    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "said", "line"),
    [
        ("a: 1\na: 2", "a is given twice, on lines 1 and 2", 0),
        ("x:\n- {1: a, 0x1: b}", "x.0.0x1 is given twice, on lines 2 and 2", 0),
        ("{1: a, true: b}", "true is given twice, on lines 1 and 1", 0),
        ("? [a]\n: b", "a key is text, a number, true, false or null, not a list or a mapping", 1),
        ("a: !!binary aGk=", "the tag !!binary is not known here", 1),
        ("a: !!bool yes", "yes is no bool", 1),
        ("a: !!int 1_0", "1_0 is no int", 1),
        ("a: 1\nb: \x01", "it holds the control character U+0001", 2),
        ("a: 1\nb: 'x\u2028y'", 'it holds U+2028: write "\\L" in double quotes for it', 2),
        ('a: "\\ud83d"', "half a surrogate pair is no Unicode", 1),
        ("a: &a {b: *a}", "it is nested too deeply, or holds itself", 0),
        ("[" * 5000, "it is nested too deeply, or holds itself", 0),
        ("a: [1", "expected ',' or ']', but got '<stream end>'", 1),
        ("x" * (MAX_CHARS + 1), f"it has {MAX_CHARS + 1} characters, and {MAX_CHARS} are allowed", 0),
    ],
)  # fmt: skip
def test_what_is_no_yaml_is_said_in_one_sentence_with_its_line(text, said, line):
    with pytest.raises(NotYaml) as caught:
        read_yaml(text)

    assert (str(caught.value), caught.value.line) == (said, line)


def test_aliases_of_aliases_are_counted_as_what_they_stand_for():
    laughs = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))

    with pytest.raises(NotYaml, match=f"more than {MAX_VALUES} values"):
        read_yaml(laughs)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("[::1]:9108", "[::1]:9108"), ("[::1]", "[::1]"), ("[fe80::1%eth0]:80", "[fe80::1%eth0]:80"), ("::1", "::1"),
        ("[http://[::1]:8000/]", ["http://[::1]:8000/"]), ("[f.py:f, https://[fd00::5]/x]", ["f.py:f", "https://[fd00::5]/x"]),
        ("redis://:pw@[::1]:6379/0", "redis://:pw@[::1]:6379/0"), ("[1, no, 010]", [1, "no", 10]), ("{a: [1], b: {c: x}}", {"a": [1], "b": {"c": "x"}}),
        ("Say: yes", "Say: yes"), ("a # b", "a # b"), ("x=y", "x=y"), ("- a", "- a"), ("*x", "*x"), ("&x", "&x"), ("!x", "!x"), ("| x", "| x"),
        ("a\nb", "a\nb"), ("@x", "@x"), ("%x", "%x"), ("#", "#"), ("?", "?"), ("<<", "<<"), ("08", 8), ("no", "no"), ("true", True), ("", None),
        ("'010'", "010"), ('"a: b"', "a: b"), (".inf", math.inf), ("5e-4", 5e-4), ("12:30:00", "12:30:00"), ("[]", []), ("\u2028", "\u2028"),
        (" 5 ", 5),
    ],
)  # fmt: skip
def test_a_value_on_the_command_line_is_yaml_where_it_is_a_list_a_mapping_or_quoted_and_else_stands_as_it_is(written, value):
    tree = given({}, [f"env.kwargs.x={written}"]).tree

    assert tree == {"env": {"kwargs": {"x": value}}}
