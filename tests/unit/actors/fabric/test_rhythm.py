"""The rhythm of phases, learned."""

from rubato.actors.fabric.rhythm import ExpectedPhase, Rhythm


def rhythm(*beats):
    learned = Rhythm()
    for phase, at in beats:
        learned.began(phase, at)
    return learned


def test_in_the_first_iteration_nothing_is_expected():
    learned = rhythm(("rollout", 0), ("train_step", 5))

    assert learned.next() is None
    assert learned.lasts("train_step") is None


def test_the_second_iteration_knows_what_follows_and_when():
    learned = rhythm(("rollout", 0), ("train_step", 5), ("rollout", 8))

    assert learned.next() == ExpectedPhase("train_step", 13)


def test_one_outlier_does_not_move_the_expectation():
    beats, at = [], 0.0
    for rollout_s in (5, 5, 60, 5, 5):
        beats += [("rollout", at), ("train_step", at + rollout_s)]
        at += rollout_s + 1

    assert rhythm(*beats).lasts("rollout") == 5


def test_a_phase_may_follow_itself():
    learned = rhythm(("rollout", 0), ("rollout", 4))

    assert learned.next() == ExpectedPhase("rollout", 8)
