"""The arrays of a trajectory stay in step with each other."""

from array import array

import pytest

from rubato.actors.envs.chat import Transcript
from rubato.actors.messages.generation import Tokens, VersionSpan


def ids(*numbers):
    return array("i", numbers).tobytes()


def tokens(*numbers, version=3):
    return Tokens(ids(*numbers), array("f", [-0.5] * len(numbers)).tobytes(), (VersionSpan(version, 0, len(numbers)),))


def test_spans_become_positions_in_the_segment_and_only_sampled_tokens_are_trained():
    transcript = Transcript(ids(1, 2, 3))

    transcript.sample(tokens(4, 5, version=3))
    transcript.show(ids(6))
    transcript.sample(tokens(7, version=4))
    segment = transcript.segment()

    assert array("i", segment.tokens).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert list(segment.mask) == [0, 0, 0, 1, 1, 0, 1]
    assert array("f", segment.logprobs).tolist() == [0, 0, 0, -0.5, -0.5, 0, -0.5]
    assert segment.spans == (VersionSpan(3, 3, 5), VersionSpan(4, 6, 7))
    assert transcript.version_first == 3


def test_the_oldest_version_counts_where_a_turn_went_on_at_an_engine_that_was_behind():
    transcript = Transcript(ids(1))

    transcript.sample(Tokens(ids(4, 5), array("f", [-0.5] * 2).tobytes(), (VersionSpan(8, 0, 1), VersionSpan(7, 1, 2))))
    transcript.sample(tokens(6, version=9))
    transcript.sample(tokens(6, version=8))

    assert (transcript.version_first, transcript.version_last) == (7, 9)


@pytest.mark.parametrize(
    "wrong",
    [
        Tokens(),
        Tokens(ids(1, 2), b"\0" * 4, (VersionSpan(1, 0, 2),)),
        Tokens(ids(1, 2), b"\0" * 8, (VersionSpan(1, 0, 1),)),
        Tokens(ids(1, 2), b"\0" * 8, (VersionSpan(1, 1, 2),)),
        Tokens(ids(1, 2), b"\0" * 8, ()),
    ],
)
def test_a_completion_whose_parts_disagree_is_refused_and_changes_nothing(wrong):
    transcript = Transcript(ids(1))

    with pytest.raises(ValueError, match="completion"):
        transcript.sample(wrong)

    assert len(transcript) == 1
    assert transcript.version_first == -1
