"""What the trainer's publisher knows of who has taken its weights, and the rows that it writes."""

import json
import math
import os
import socket

import msgspec
import numpy as np
import pytest

from rubato.actors.checkpoints.model_folder import read_header, sampled_slices, slice_digest
from rubato.actors.messages.weights import WeightsDigest, WeightsPublished, WeightsTaken
from rubato.actors.report.advice import advice_metrics
from rubato.actors.training.publishing import Publisher
from rubato.actors.training.rows import Rows, batch_metrics, cpu_used, off_policy, others_metrics
from rubato.actors.training.train_engine import StepResult, TrainError
from rubato.actors.weights.transport import BlobSender, WeightsSample, as_computed
from rubato.runtime.actor import Actor
from rubato.runtime.registry import ActorRecord


class Trainer(Actor):
    role = "trainer"


@pytest.fixture
def publisher(on_stage):
    """`publisher(play)`: `await play(publisher)` with two engines, version 3 of term 1 published."""

    def run(play):
        async def main(context):
            context.actors |= {"engine-1": None, "engine-2": None}
            actor = Trainer(None, context)
            made = Publisher(actor, BlobSender(actor))
            made.published = WeightsPublished(3, 1, "", 500)
            await play(made)

        on_stage(main, name="trainer-1")

    return run


def test_weights_have_arrived_when_the_last_engine_has_this_very_version(publisher):
    async def play(made):
        assert not made.taken(WeightsTaken("engine-1", 3, 1))
        assert not made.taken(WeightsTaken("engine-2", 2, 1))
        assert not made.taken(WeightsTaken("engine-2", 3, 0))
        assert made.taken(WeightsTaken("engine-2", 3, 1))

    publisher(play)


def test_weights_that_turn_out_not_to_be_finite_are_announced_to_none_and_told_to_those_that_wait(publisher):
    class Sender:
        """Takes what is written, and finds out as it completes it."""

        async def send(self, version, source):
            async def announce():
                raise TrainError("a is not finite")

            return announce

    async def play(made):
        made._sender, before = Sender(), made.published
        await made.publish(4, 1, None)

        for _ in range(2):
            with pytest.raises(TrainError, match="a is not finite"):
                await made.announced()
        with pytest.raises(TrainError, match="a is not finite"):
            await made.publish(5, 1, None)
        assert made.published is before

    publisher(play)


def image_of(**arrays):
    header, body = {}, b""
    for name, array in arrays.items():
        kind = {"<f4": "F32", "<f2": "F16", "<u2": "BF16"}[array.dtype.str]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(body), len(body) + array.nbytes]}
        body += array.tobytes()
    text = json.dumps(header).encode()
    return memoryview(len(text).to_bytes(8, "little") + text + body)


def digest_of(sample, dtype="float32", *, spoilt=(), unknown=()):
    """Of an engine that computes with what was published, but for some tensors."""
    found = b""
    for cut, (stored, values) in zip(sample.slices, sample.parts, strict=True):
        computed = as_computed(values, stored, dtype)
        own = bytes(8) if cut.name in unknown else slice_digest(computed)
        found += slice_digest(b"stale") if cut.name in spoilt else own
    return WeightsDigest(dtype, found)


LARGE = np.random.default_rng(1).standard_normal((300, 400)).astype("<f4")


def test_an_engine_that_computes_with_other_tensors_is_named_with_version_and_tensor(publisher):
    async def play(made):
        sample = made._sender._samples["", 1, 3] = WeightsSample.of(image_of(body=LARGE, head=2 * LARGE), 7, 3)

        assert made.disagreement(WeightsTaken("engine-2", 3, 1, digest_of(sample))) == ""
        said = made.disagreement(WeightsTaken("engine-2", 3, 1, digest_of(sample, spoilt=["head"])))
        for words in ("trainer and engine disagree: engine-2", "version 3", "head first"):
            assert words in said

    publisher(play)


def test_nothing_is_said_of_an_engine_that_can_not_tell_nor_of_a_version_that_somebody_else_published(publisher):
    async def play(made):
        sample = made._sender._samples["", 1, 3] = WeightsSample.of(image_of(body=LARGE, other=LARGE), 7, 3)
        stale = digest_of(sample, spoilt=["body"])

        assert made.disagreement(WeightsTaken("engine-1", 3, 1)) == ""
        assert made.disagreement(WeightsTaken("engine-1", 3, 2, stale)) == ""
        assert made.disagreement(WeightsTaken("engine-1", 2, 1, stale)) == ""
        assert made.disagreement(WeightsTaken("engine-1", 3, 1, digest_of(sample, unknown=["other"]))) == ""

    publisher(play)


def test_a_sample_is_compared_in_the_type_that_the_engine_computes_in():
    import torch

    values = torch.from_numpy(LARGE.reshape(-1))
    stored = {"F32": values, "F16": values.to(torch.float16), "BF16": values.to(torch.bfloat16), "F64": values.double() / 3}

    for kind, tensor in stored.items():
        for dtype in ("float32", "bfloat16"):
            computed = tensor.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
            assert as_computed(tensor.view(torch.uint8).numpy().tobytes(), kind, dtype) == computed


def test_every_version_is_sampled_elsewhere_and_alike_by_whoever_knows_the_seed():
    header = read_header(image_of(body=LARGE, bias=LARGE[0]), "it")

    first, again, later, other = (sampled_slices(header, *key) for key in ((7, 3), (7, 3), (7, 4), (8, 3)))

    assert first == again
    assert len({tuple(each) for each in (first, later, other)}) == 3
    assert len(first) == 64
    assert {cut[1:] for cut in first if cut.name == "bias"} <= {(0, 1, 0, 400)}
    body = [cut for cut in first if cut.name == "body"]
    assert {(cut.bottom - cut.top, cut.right - cut.left) for cut in body} == {(32, 32)}
    assert all(0 <= cut.top < cut.bottom <= 300 and 0 <= cut.left < cut.right <= 400 for cut in body)
    assert len({cut[1:] for cut in body}) > 50


def test_rows_after_the_checkpoint_and_a_torn_line_are_forgotten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time/wall_s": 2.0}\n{"step": 2, "time/wall_s": 4.0}\n{"step": 3}\n{"st')

    rows = Rows(path)
    rows.truncate(2)
    rows.append({"step": 3, "reward/mean": 0.5})

    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert rows.wall_s == 4.0


@pytest.mark.parametrize("damage", [b'{"step": 2, "time/wa', b"[]", b"{}", b"\xff\x00", b'{"step": "two"}'], ids=repr)
def test_damaged_lines_are_left_out_and_counted(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n{"torn')

    assert Rows(path).truncate(9) == 1

    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'


def test_a_figure_that_is_not_finite_is_left_out(tmp_path):
    rows = Rows(tmp_path / "metrics.jsonl")

    rows.append({"step": 1, "policy/kl": math.nan, "optim/lr": 0.1})

    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "optim/lr": 0.1}


def test_ages_count_from_the_version_the_update_starts_from(trajectory):
    group = [trajectory([1, 2], [0, 1], version=version) for version in (3, 4)]

    found = batch_metrics([group], 5)

    assert found["staleness/max"] == 1.0
    assert found["staleness/mean"] == pytest.approx(0.5)
    assert found["rollout/len_mean"] == 2.0


def test_a_row_counts_sampled_tokens_apart_and_says_how_many_were_cut_and_where_their_time_went(trajectory):
    one, other = trajectory([1, 2, 3, 4], [0, 1, 1, 1]), trajectory([1, 2], [0, 1])
    group = [msgspec.structs.replace(one, cut=True, wall_s=3.0, env_s=2.0), other]

    found = batch_metrics([group], 1)

    assert (found["rollout/len_mean"], found["rollout/sampled_mean"], found["rollout/cut_frac"]) == (3.0, 2.0, 0.5)
    assert found["rollout/env_frac"] == pytest.approx(2.0 / 3.1)


def record(name, **fields) -> ActorRecord:
    role = name.rpartition("-")[0]
    return ActorRecord(name, role, "", 1, **({"pid": os.getpid(), "host": socket.gethostname(), "state": "ready"} | fields))


def test_cpu_seconds_are_of_this_host_alone():
    used = cpu_used([record("engine-1"), record("engine-2", node="node-2")], "node-1")

    assert used["cpu/engine-1"] > 0
    assert "cpu/engine-2" not in used
    assert used["cpu/host"] >= used["cpu/engine-1"] * 0.9
    assert used["cpu/cores"] == os.cpu_count()


def test_a_row_has_the_slowest_engines_pull_and_pause_and_the_least_share_that_was_hidden():
    told = [(0.5, 1.0, 0.1), (0.75, 2.0, 0.04)]
    names = ("weights/transfer_s_p50", "weights/pull_s_p50", "weights/pause_s_p50")
    engines = [record(f"engine-{i}", metrics=dict(zip(names, each, strict=True))) for i, each in enumerate(told)]

    row = others_metrics([*engines, record("engine-3")])

    assert {name: value for name, value in row.items() if name.startswith("weights/")} == {
        "weights/transfer_s": 0.75,
        "weights/pull_s": 2.0,
        "weights/pause_s": 0.1,
        "weights/hidden_frac": pytest.approx(0.9),
    }
    assert not any(name.startswith("weights/") for name in others_metrics([record("engine-3")]))


def test_a_row_has_room_and_slots_of_all(tmp_path, trajectory):
    managers = [record(f"env_manager-{n}", metrics={"rollout/room": 2.0, "rollout/env_workers": 1.0}) for n in (1, 2)]
    engine = record("engine-1", metrics={"rollout/slots": 64.0})
    groups = [[msgspec.structs.replace(trajectory([1, 2], [0, 1]), wall_s=2.0, env_s=0.1)] * 4]
    times = {"time/step": 2.0, "time/wait_for_batch": 1.9, "time/train": 0.1}

    rows = Rows(tmp_path / "metrics.jsonl")
    row = rows.append_step(1, StepResult({}, 8), groups, times, {}, [*managers, engine])

    assert (row["rollout/room"], row["rollout/env_workers"], row["rollout/slots"]) == (4.0, 2.0, 64.0)
    assert row["rollout/wall_s_mean"] == 2.0
    assert advice_metrics([row], 1)["advice/rollout-bound/concurrency_2_times"] == pytest.approx(0.95)


def test_a_row_says_that_engines_are_paced_and_the_share_of_all_their_steps_that_took_longer():
    figures = [(1000.0, 0.01), (3000.0, 0.03)]
    paced = [{"paced/engines": 1.0, "paced/steps": n, "paced/outlasted_frac": share} for n, share in figures]
    engines = [record(f"engine-{i}", metrics=metrics) for i, metrics in enumerate([*paced, {"engine/tokens_s": 5.0}])]

    row = others_metrics(engines)

    assert row["paced/engines"] == 2.0
    assert row["paced/outlasted_frac"] == pytest.approx(0.025)
    assert not [name for name in others_metrics(engines[2:]) if name.startswith("paced/")]


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({}, {"ess": 1.0, "kl": 0.0}),
        ({"policy/ess": 0.5, "policy/kl": 0.3}, {"ess": 0.5, "kl": 0.3}),
        ({"policy/kl": 0.1, "policy/mismatch_kl": 0.2}, {"ess": 1.0, "kl": 0.0}),
        ({"policy/ess": float("nan"), "policy/kl": float("inf")}, {}),
    ],
)
def test_what_ages_cost_is_told_without_what_engine_and_trainer_compute_differently(metrics, told):
    assert off_policy(metrics) == told
