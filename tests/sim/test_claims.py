"""A claim is judged by its band; what differs from the expectation is told, in either direction."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from rubato.runtime.errors import ConfigError
from rubato.sim.claims import BOUNDS, ClaimSpec, judge, summary
from rubato.sim.scenario import load


def claim(**fields):
    return ClaimSpec.model_validate({"name": "x", "paper": 0.69, "source": "table 1", **fields})


def own(**fields):
    return ClaimSpec.model_validate({"name": "x", "kind": "ours", "bar": 0.69, **fields})


@pytest.mark.parametrize(
    ("tolerance", "ours", "holds"),
    [
        ("0.05", 0.74, True), ("0.05", 0.7401, False), ("10%", 0.759, True), ("10%", 0.7591, False),
        ("at least", 0.69, True), ("at least", 0.68, False), ("at most", 0.69, True), ("at most", 0.7, False),
        ("factor 3", 2.07, True), ("factor 3", 0.229, False), ("factor 3", 2.08, False), ("factor 1", 0.69, True),
        ("exact", 0.69, True), ("exact", 0.690001, False),
    ],
)  # fmt: skip
def test_the_band_decides_and_includes_its_edge(tolerance, ours, holds):
    (judged,) = judge([claim(tolerance=tolerance)], {"x": ours})

    assert judged.holds is holds


def test_a_claim_that_holds_although_expected_to_fail_is_as_surprising_as_the_opposite():
    specs = [
        claim(name="good", tolerance="0.1"),
        claim(name="bad", tolerance="0.1"),
        claim(name="known", tolerance="0.1", expected="fails", reason="why"),
        claim(name="lucky", tolerance="0.1", expected="fails", reason="why"),
    ]

    judged = judge(specs, {"good": 0.7, "bad": 0.9, "known": 0.9, "lucky": 0.7})

    assert [c.name for c in judged if c.surprising] == ["bad", "lucky"]
    assert summary(judged) == (
        "simulated: 2 of 4 published claims hold; 1 expected to fail: known; bad fails, against the expectation; "
        "lucky holds, against the expectation"
    )


def test_an_ordering_is_compared_as_true_or_false():
    (judged,) = judge([claim(paper=True)], {"x": False})

    assert judged.holds is False
    assert judged.ours is False


def test_a_claim_without_its_figure_is_refused_unless_it_is_optional():
    with pytest.raises(ConfigError, match="claim x is about no figure of this run"):
        judge([claim()], {"y": 1.0}, optional=["y"])

    assert judge([claim()], {"y": 1.0}, optional=["x"]) == ()


@pytest.mark.parametrize(("paper", "ours"), [(True, 1.0), (1, True), (0.5, False)])
def test_a_number_is_not_held_against_true_or_false(paper, ours):
    with pytest.raises(ConfigError, match="claim x can't be judged: paper is"):
        judge([claim(paper=paper, tolerance="at least")], {"x": ours})


@pytest.mark.parametrize(
    "fields",
    [
        {"source": ""}, {"source": "  "}, {"paper": None}, {"bar": 0.7}, {"kind": "published", "paper": None, "bar": 0.7},
        {"kind": "ours"}, {"kind": "ours", "bar": 0.7}, {"kind": "ours", "paper": None}, {"kind": "measured"},
    ],
)  # fmt: skip
def test_a_published_claim_needs_what_is_stated_and_where_and_one_of_ours_states_nothing_of_a_paper(fields):
    with pytest.raises(ValidationError):
        claim(**fields)


def test_what_is_published_and_what_is_ours_are_told_and_counted_apart():
    judged = judge(
        [claim(name="a"), claim(name="b"), own(name="c", tolerance="at least"), own(name="d", tolerance="at most")],
        {"a": 0.69, "b": 0.7, "c": 0.7, "d": 0.6},
    )

    assert [(c.kind, c.paper, c.bar) for c in judged] == [
        ("published", 0.69, None), ("published", 0.69, None), ("ours", None, 0.69), ("ours", None, 0.69),
    ]  # fmt: skip
    assert summary(judged).startswith("simulated: 1 of 2 published and 2 of 2 of our own claims hold")
    assert summary(judged[2:]) == "simulated: 2 of 2 of our own claims hold"


def test_a_published_value_missed_beyond_its_tolerance_fails_although_a_bar_of_ours_is_kept():
    published = claim(paper=1.97, tolerance="15%")
    ours = own(bar=1.3, tolerance="at least")

    judged = judge([published, ours], {"x": 1.315})

    assert [c.holds for c in judged] == [False, True]


SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "sim").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_claim_has_one_value_and_a_bound_only_where_the_source_states_one(path):
    claims = load(path).scenario.claims

    assert claims
    assert len({c.name for c in claims}) == len(claims)
    for each in claims:
        assert (each.paper is None) == (each.kind == "ours")
        if each.kind == "published" and each.tolerance in BOUNDS:
            assert any(words in each.source for words in ("parity", "at most", "at least")), each.name


def test_each_number_of_rollmux_philly_is_the_one_that_its_source_states():
    numbers = [c for c in load(SHIPPED[0].with_name("rollmux_philly.yaml")).scenario.claims if c.paper is not True]

    for each in numbers:
        assert each.kind == "published"
        assert each.tolerance not in BOUNDS
        _, _, said = each.source.partition(": ")
        stated = [float(number) for number in re.findall(r"\d\.\d+", said.split(" over ")[0].split(" between ")[0])]
        assert each.paper == pytest.approx(sum(stated) / len(stated) if stated else 1.0), each.name


def test_no_parameter_that_an_outcome_chose_stands_without_it():
    chosen = {path.stem: load(path).scenario.chosen for path in SHIPPED}

    assert {"rfabric_throughput", "rfabric_cost", "rollmux_micro", "orchestrrl_joint", "rollart_failures"} <= {
        name for name, told in chosen.items() if told
    }
    assert all(why.strip() for told in chosen.values() for why in told.values())


@pytest.mark.parametrize(
    "fields",
    [
        {"expected": "fails"},
        *({"tolerance": text} for text in ("about", "-1%", "nan", "inf", "factor 0", "factor 0.5", "factor 5%", "5%%", "factor ")),
    ],
)
def test_a_claim_needs_a_band_and_a_reason_to_fail(fields):
    with pytest.raises(ValidationError):
        claim(**fields)
