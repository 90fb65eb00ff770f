"""When engines begin to sample from another policy than is trained, and what is said to be the cause."""

import pytest

from rubato.actors.training.checks import PATIENCE, MismatchWatch, why_apart


@pytest.mark.parametrize(
    ("values", "alarms"),
    [
        ([0.0, *[0.1] * PATIENCE], [PATIENCE]),
        ([0.1] * PATIENCE, [PATIENCE - 1]),
        ([0.1] * (2 * PATIENCE), [PATIENCE - 1]),  # told of once
        ([*[0.1] * (PATIENCE - 1), 0.001], []),
        ([0.1, 0.1, 0.001, *[0.1] * PATIENCE], [PATIENCE + 2]),
    ],
)
def test_engines_begin_to_part_when_the_mismatch_stays_above_the_limit_and_are_told_of_once(values, alarms):
    watch = MismatchWatch("bfloat16")

    assert [at for at, value in enumerate(values) if watch.alarms(value)] == alarms


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"agreed_before": True, "agrees_at_1": True}, "engine-2 gives log-probs of temperature 1"),
        ({"agreed_before": True, "agrees_at_1": False}, "weights most likely never reached engine-2"),
        ({"agreed_before": False, "agrees_at_1": False}, "same model folder, and compute in the same dtype"),
    ],
)
def test_the_likely_cause_follows_from_what_agrees(facts, words):
    assert words in why_apart("engine-2", temperature=0.5, **facts)


def test_a_mismatch_in_spite_of_agreement_points_at_kept_caches_and_else_at_the_check():
    watch = MismatchWatch("bfloat16")
    watch.alarms(0.02)

    assert "engine.kv_on_update=recompute" in watch.why(compared=True)
    assert "check.enabled=true" in watch.why(compared=False)
