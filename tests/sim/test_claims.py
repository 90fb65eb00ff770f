"""A claim is judged by its band; what differs from the expectation is told, in either direction."""

import pytest
from pydantic import ValidationError

from runtime.errors import ConfigError
from sim.claims import ClaimSpec, judge, summary


def claim(**fields):
    return ClaimSpec.model_validate({"name": "x", "paper": 0.69, **fields})


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
        "simulated: 2 of 4 claims hold; 1 expected to fail: known; bad fails, against the expectation; "
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
        {"expected": "fails"},
        *(
            {"tolerance": text}
            for text in ("about", "-1%", "nan", "inf", "factor 0", "factor 0.5", "factor 5%", "5%%", "factor ")
        ),
    ],
)
def test_a_claim_needs_a_band_and_a_reason_to_fail(fields):
    with pytest.raises(ValidationError):
        claim(**fields)
