"""What a trajectory must be before it is acknowledged: training computes with all that is."""

import asyncio
import json
import math
from array import array

import msgspec
import pytest

from rubato.actors.messages.generation import VersionSpan
from rubato.actors.messages.samples import Advance, Batch, Claim, DrawTerm, Evaluate, Put, Segment, Ticket, Trajectory
from rubato.actors.samples.sample import flaw

VOCABULARY, NEWEST = 100, 5
TICKET = Ticket("g00000000.0", "g00000000", 1, 0, 7, 3)


def ints(*values):
    return array("i", values).tobytes()


def floats(*values):
    return array("f", values).tobytes()


SEGMENT = Segment(
    tokens=ints(1, 2, 99, 0, 5, 6),
    mask=bytes([0, 1, 1, 0, 1, 1]),
    logprobs=floats(0.0, -0.5, -30.0, 0.0, -1.0, -2.0),
    spans=(VersionSpan(3, 1, 3), VersionSpan(4, 4, 6)),
)


def trajectory_with(ticket=TICKET, segments=(SEGMENT,), **changes):
    whole = Trajectory(ticket, tuple(segments), 0.5, 2, False, 0.1)
    return msgspec.structs.replace(whole, **changes)


def segment_with(**changes):
    return trajectory_with(segments=[msgspec.structs.replace(SEGMENT, **changes)])


def spans(*spans):
    return segment_with(spans=tuple(VersionSpan(*span) for span in spans))


FLAWED = (
    {
        "a score that is no number": (
            trajectory_with(scores={"env": math.nan}),
            "bad_trajectory: its scores are more than 64, or one of them is not finite",
        ),
        "too many numbers of the environment": (
            trajectory_with(info={f"k{n}": 0.0 for n in range(65)}),
            "bad_trajectory: its numbers of info are more than 64, or one of them is not finite",
        ),
        "a token outside the vocabulary": (
            segment_with(tokens=ints(1, 2, 100, 0, 5, 6)),
            "bad_trajectory: token 100 is outside the vocabulary of 100",
        ),
        "a negative token": (segment_with(tokens=ints(1, 2, -1, 0, 5, 6)), "bad_trajectory: token -1 is none of a vocabulary"),
        "the largest int32": (
            segment_with(tokens=ints(1, 2, 2**31 - 1, 0, 5, 6)),
            "bad_trajectory: token 2147483647 is outside the vocabulary of 100",
        ),
        "bytes that are no whole int32": (
            segment_with(tokens=SEGMENT.tokens[:-1]),
            "bad_trajectory: a segment has 23 bytes of tokens, 24 of log-probs and 6 of mask",
        ),
        "a short mask": (
            segment_with(mask=SEGMENT.mask[:-1]),
            "bad_trajectory: a segment has 24 bytes of tokens, 24 of log-probs and 5 of mask",
        ),
        "short log-probs": (
            segment_with(logprobs=SEGMENT.logprobs[:-4]),
            "bad_trajectory: a segment has 24 bytes of tokens, 20 of log-probs and 6 of mask",
        ),
        "tokens without a mask": (
            segment_with(mask=b""),
            "bad_trajectory: a segment has 24 bytes of tokens, 24 of log-probs and 0 of mask",
        ),
        "a mask of 2": (segment_with(mask=bytes([0, 2, 1, 0, 1, 1])), "bad_trajectory: a mask holds something else than 0 and 1"),
        "a span past the end": (spans((3, 1, 3), (4, 4, 7)), "the span 4 to 7 does not lie in order within 6 tokens"),
        "a span before the beginning": (spans((3, -1, 3), (4, 4, 6)), "the span -1 to 3 does not lie in order"),
        "an empty span": (spans((3, 1, 3), (4, 4, 4), (4, 4, 6)), "the span 4 to 4 does not lie in order"),
        "a span that ends before it begins": (spans((3, 3, 1), (4, 4, 6)), "the span 3 to 1 does not lie in order"),
        "spans out of order": (spans((3, 4, 6), (4, 1, 3)), "the span 1 to 3 does not lie in order within 6 tokens"),
        "spans that overlap": (spans((3, 1, 5), (4, 4, 6)), "the span 4 to 6 does not lie in order within 6 tokens"),
        "sampled tokens that no span covers": (spans((3, 1, 3), (4, 5, 6)), "spans cover 3 of 4 sampled tokens"),
        "no span at all": (segment_with(spans=()), "bad_trajectory: spans cover 0 of 4 sampled tokens"),
        "a future version": (spans((3, 1, 3), (6, 4, 6)), "future_version: it was sampled under version 6, and 5 is the newest"),
        "a version below the ticket's": (
            trajectory_with(ticket=msgspec.structs.replace(TICKET, version=4)),
            "bad_trajectory: it was sampled under version 3, its ticket says 4",
        ),
        "no segment": (trajectory_with(segments=()), "bad_trajectory: it has no sampled token"),
        "no sampled token": (segment_with(mask=bytes(6), spans=()), "bad_trajectory: it has no sampled token"),
        "spans that cover no sampled token": (segment_with(mask=bytes(6)), "bad_trajectory: it has no sampled token"),
        "a NaN reward": (trajectory_with(reward=math.nan), "reward_not_finite"),
        "an infinite reward": (trajectory_with(reward=-math.inf), "reward_not_finite"),
        "a reward beyond float32": (trajectory_with(reward=1e200), "reward_out_of_range"),
        "a temperature that is not finite": (trajectory_with(temperature=math.nan), "bad_trajectory: its temperature is nan"),
        "a temperature below 0": (trajectory_with(temperature=-1.0), "bad_trajectory: its temperature is -1.0"),
        "a temperature that no float32 divides by": (trajectory_with(temperature=1e-40), "its temperature is 1e-40"),
        "a second segment that is flawed": (
            trajectory_with(segments=[SEGMENT, msgspec.structs.replace(SEGMENT, mask=b"")]),
            "24 of log-probs and 0 of mask",
        ),
    }
    | {
        f"log-probs {', '.join(map(str, wrong))}": (
            segment_with(logprobs=floats(0.0, *wrong, 0.0, 0.0, 0.0, 0.0)[:24]),
            "bad_trajectory: a log-probability is not finite",
        )
        for wrong in ((math.nan,), (math.inf,), (-math.inf,), (math.inf, -math.inf), (math.nan, math.inf))
    }
    | {
        f"a log-prob of {wrong}": (
            segment_with(logprobs=floats(0.0, wrong, 0.0, 0.0, 0.0, 0.0)),
            f"bad_trajectory: a log-probability is {wrong:g}, {what}",
        )
        for wrong, what in ((0.5, "above 0"), (0.01, "above 0"), (-1e4, "below -100"), (-3e38, "below -100"))
    }
)


@pytest.mark.parametrize("case", list(FLAWED))
def test_a_trajectory_that_training_could_not_compute_with_is_named(case):
    trajectory, named = FLAWED[case]

    found = flaw(trajectory, newest=NEWEST, vocab_size=VOCABULARY)

    assert named in found


@pytest.mark.parametrize(
    "trajectory",
    [
        trajectory_with(),
        trajectory_with(segments=[SEGMENT, SEGMENT]),
        trajectory_with(segments=[SEGMENT, Segment(b"", b"", b"", ())]),
        trajectory_with(segments=[SEGMENT, Segment(ints(1), b"\0", floats(0.0), ())]),
        spans((3, 1, 2), (4, 2, 6)),
        spans((5, 0, 6)),
        segment_with(logprobs=floats(0.0, 1e-6, -60.0, 0.0, -0.0, 0.0)),
        trajectory_with(reward=0.0),
        trajectory_with(reward=-1e30),
    ],
)
def test_a_whole_trajectory_passes(trajectory):
    assert flaw(trajectory, newest=NEWEST, vocab_size=VOCABULARY) == ""


def test_without_a_vocabulary_ids_are_only_checked_for_their_sign():
    large = segment_with(tokens=ints(1, 2, 2**31 - 1, 0, 5, 6))
    negative = segment_with(tokens=ints(1, 2, -7, 0, 5, 6))

    assert flaw(large, newest=NEWEST, vocab_size=None) == ""
    assert "token -7" in flaw(negative, newest=NEWEST, vocab_size=None)


def with_vocabulary(stage):
    folder = stage.folder / stage.config.model.path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))


@pytest.mark.parametrize("case", [case for case in FLAWED if case != "a future version"])
def test_a_put_of_a_flawed_trajectory_fails_by_name_and_its_group_goes_on(make_stage, case):
    stage = make_stage(batch_groups=1, group_size=3, alpha=4)
    with_vocabulary(stage)
    flawed, named = FLAWED[case]

    async def scene():
        await stage.start()
        term = (await stage.buffer.draw_term(DrawTerm(0, 5))).term  # so that 5 is the newest version
        bad, *good = await stage.admit(num=3)
        version = flawed.ticket.version
        ticket = msgspec.structs.replace(bad, version=version)

        reply = await stage.buffer.put(Put(msgspec.structs.replace(flawed, ticket=ticket)))
        again = await stage.buffer.put(Put(msgspec.structs.replace(flawed, ticket=ticket)))
        for reward, ticket in enumerate(good):
            await stage.put(ticket, float(reward))
        batch = await stage.buffer.claim(Claim(6, term, 1, 0.0))
        await asyncio.sleep(1.0)
        (line,) = [json.loads(line) for line in (stage.folder / "samples.jsonl").read_text().splitlines()]

        assert (reply.fate, again.fate) == ("failed", "failed")
        assert isinstance(batch, Batch)
        assert [len(group) for group in batch.groups] == [2]
        assert (line["trajectory_id"], line["fate"], line["step"]) == (bad.trajectory_id, "failed", None)
        assert named in line["reason"]

    stage.run(scene)


def test_a_rollout_under_weights_that_are_not_there_yet_is_issued_again(stage):
    async def scene():
        await stage.start()
        (ticket,) = await stage.admit(num=1)

        fate = await stage.put(ticket, version_first=3)
        (again,) = await stage.admit(num=1)

        assert fate == "superseded"
        assert (again.trajectory_id, again.attempt) == (ticket.trajectory_id, 2)

    stage.run(scene)


@pytest.mark.parametrize("num_tokens", [4, 20_000])
def test_a_flawed_trajectory_is_kept_nowhere(make_stage, trajectory, num_tokens):
    stage = make_stage(batch_groups=1)

    async def scene():
        await stage.start()
        (ticket,) = await stage.admit(num=1)
        whole = trajectory(ticket, num_tokens=num_tokens)
        segment = msgspec.structs.replace(whole.segments[0], mask=b"")

        await stage.buffer.put(Put(msgspec.structs.replace(whole, segments=(segment,))))

        assert await stage.store.scan("samples/payload/") == {}
        assert not (stage.folder / "samples").exists()

    stage.run(scene)


def test_the_user_is_told_once_of_each_kind_of_flaw(stage, trajectory):
    async def scene():
        await stage.start()
        tickets = await stage.admit(num=4)
        for ticket, value in zip(tickets, (0.5, 0.7, -1e4, 0.6), strict=True):
            whole = trajectory(ticket)
            segment = msgspec.structs.replace(whole.segments[0], logprobs=floats(*[value] * len(whole.segments[0].mask)))
            await stage.buffer.put(Put(msgspec.structs.replace(whole, segments=(segment,))))

    stage.run(scene)

    told = [notice for notice in stage.notices if "was refused" in notice]
    assert len(told) == 2
    assert "a log-probability is 0.5, above 0" in told[0]
    assert "a log-probability is -10000, below -100" in told[1]


def test_a_flawed_held_out_rollout_is_a_failed_one(stage, trajectory):
    async def scene():
        await stage.start()
        asking = stage.tasks.create_task(stage.buffer.evaluate(Evaluate("step-0", 2, wait_s=5.0)))
        await asyncio.sleep(0.1)
        bad, good = await stage.admit(num=2)

        reply = await stage.buffer.put(Put(trajectory(bad, math.nan)))
        await stage.put(good, 1.0)
        result = await asking

        assert reply.fate == "failed"
        assert (result.rewards, result.failed) == (((), (1.0,)), 1)

    stage.run(scene)


def test_a_held_out_rollout_of_which_a_token_is_of_another_version_does_not_count(stage, trajectory):
    async def scene():
        await stage.start()
        await stage.buffer.evaluate(Evaluate("step-0", 1, wait_s=0.0))
        await stage.buffer.advance(Advance(1, 1))
        (ticket,) = await stage.admit(num=1)
        whole = trajectory(ticket, 1.0)
        segment = whole.segments[0]
        (span,) = segment.spans
        middle = (span.start + span.end) // 2
        assert span.start < middle < span.end
        spans = (VersionSpan(0, span.start, middle), VersionSpan(1, middle, span.end))
        segments = (msgspec.structs.replace(segment, spans=spans),)

        reply = await stage.buffer.put(Put(msgspec.structs.replace(whole, segments=segments)))

        assert reply.fate == "failed"

    stage.run(scene)


def test_a_trajectory_of_which_nothing_was_sampled_has_no_first_version():
    with pytest.raises(ValueError, match=r"trajectory g00000000\.0 has no first version: nothing of it was sampled"):
        _ = trajectory_with(segments=[]).version_first
