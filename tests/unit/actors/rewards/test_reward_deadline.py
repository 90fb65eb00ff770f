import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.actors.rewards.deadlines import DeadlineRule, anchored, deadline_s

SECONDS = st.floats(0, 1000)


def test_the_published_rule() -> None:
    rule = DeadlineRule()

    assert [deadline_s(rule, anchor) for anchor in (0.1, 4.0, 25.0, None)] == [2.0, 6.0, 30.0, 30.0]


@given(SECONDS, SECONDS)
def test_slower_correct_responses_never_shorten_it(one: float, other: float) -> None:
    low, high = sorted((one, other))

    assert 2.0 <= deadline_s(DeadlineRule(), low) <= deadline_s(DeadlineRule(), high) <= 30.0


@given(st.lists(st.tuples(st.sampled_from("ab"), SECONDS, st.booleans())))
def test_an_anchor_is_the_longest_correct_one_of_its_task(seen: list[tuple[str, float, bool]]) -> None:
    anchors: dict[str, float] = {}
    for task, took_s, correct in seen:
        anchors = anchored(anchors, task, took_s, correct=correct)

    for task in "ab":
        right = [took_s for name, took_s, correct in seen if name == task and correct]
        assert anchors.get(task) == (max(right) if right else None)


@pytest.mark.parametrize("rule", [DeadlineRule(factor=0.5), DeadlineRule(least_s=3, most_s=2), DeadlineRule(least_s=0)])
def test_a_rule_that_makes_no_sense_is_refused(rule: DeadlineRule) -> None:
    with pytest.raises(ValueError, match=r"factor|least_s"):
        rule.checked()
