"""What a step minimises: the same whatever the micro-batches, the same as a synchronous one, and what older samples weigh in it."""

import math
import random
from typing import NamedTuple

import msgspec
import pytest
import torch

from rubato.actors.config import LOSSES, ModelSection, TrainSection
from rubato.actors.training.losses import Figures, Objective, Policies, group_advantages
from rubato.actors.training.torch_train import TorchTrainEngine
from rubato.actors.training.train_engine import TrainError
from rubato.runtime.importer import load_object

GROUPS, SIZE = 4, 3


@pytest.fixture
def engine(model_folder):
    def make(**options):
        train = TrainSection(**{"lr": 1e-3, "minibatches": 1, **options})
        found = TorchTrainEngine(ModelSection(path=str(model_folder)), train, steps=10, seed=1)
        found.load(model_folder, None)
        return found

    return make


def groups_of(engine, trajectory, *, version=0, noise=0.0, seed=5):
    """Rollouts of many lengths, with log-probabilities of the engine's present policy, moved by up to `noise`."""
    chance = random.Random(seed)
    found = []
    for _ in range(GROUPS):
        group = []
        for _ in range(SIZE):
            length = chance.randrange(4, 20)
            tokens = [chance.randrange(2, 32) for _ in range(length)]
            mask = [0, 0, *(int(chance.random() < 0.7) for _ in range(length - 3)), 1]
            known = engine.logprobs([tokens])[0]
            kept = [m * (p + chance.uniform(-noise, noise)) for m, p in zip(mask, known, strict=True)]
            group.append(trajectory(tokens, mask, kept, chance.random(), version))
        found.append(group)
    return found


def weights(engine):
    return torch.cat([p.detach().flatten() for p in engine._model.parameters()])


def gradient(engine):
    return torch.cat([p.grad.flatten() for p in engine._model.parameters()])


ALL = [
    *({"loss": loss} for loss in LOSSES),
    {"advantage": "rloo"},
    {"advantage": "reinforce_pp"},
    {"importance": {"mode": "truncate", "level": "sequence"}, "proximal": "recomputed"},
    {"importance": {"mode": "mask", "cap": 1.1}, "proximal": "recomputed"},
    {"importance": {"mode": "truncate", "cap": 1.1}},
    {"kl_coef": 0.1},
]


@pytest.mark.parametrize("options", ALL, ids=str)
def test_micro_batches_and_packing_change_no_update(engine, trajectory, options):
    whole, cut = engine(**options, micro_batch_tokens=4096), engine(**options, micro_batch_tokens=24)
    before = weights(whole)
    groups = groups_of(whole, trajectory, noise=0.3)

    whole.train(1, groups)
    cut.train(1, groups)

    assert (gradient(whole) - gradient(cut)).abs().max() < 1e-5 * gradient(whole).abs().max()
    assert (weights(whole) - weights(cut)).abs().max() < 1e-5
    assert (weights(whole) - before).abs().max() > 5e-4


def test_a_synchronous_step_is_that_of_a_plain_loop(engine, trajectory, model_folder):
    """One optimiser step over whole sequences, one by one, without packing, weights or a proximal policy."""
    from transformers import AutoModelForCausalLM

    subject = engine()
    groups = groups_of(subject, trajectory)
    subject.train(1, groups)

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    total, count = torch.zeros(()), 0
    for group in groups:
        for t, advantage in zip(group, group_advantages([t.reward for t in group]), strict=True):
            segment = t.segments[0]
            ids = torch.frombuffer(bytearray(segment.tokens), dtype=torch.int32).long()
            logits = model(ids.unsqueeze(0)).logits[0].log_softmax(-1)
            behaviour = torch.frombuffer(bytearray(segment.logprobs), dtype=torch.float32)
            for at in range(1, len(ids)):
                if segment.mask[at]:
                    ratio = (logits[at - 1, ids[at]] - behaviour[at]).exp()
                    total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                    count += 1
    (total / count).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (weights(subject) - expected).abs().max() < 1e-6


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("proximal", ["behaviour", "recomputed"])
def test_fresh_samples_are_trained_as_if_the_bound_were_zero(engine, trajectory, mode, proximal):
    """α = 0 equals synchronous training: corrected or not, the same samples make the same update."""
    plain, corrected = engine(minibatches=2), engine(minibatches=2, proximal=proximal, importance={"mode": mode})
    groups = groups_of(plain, trajectory)

    plain.train(1, groups)
    result = corrected.train(1, groups)

    assert (weights(plain) - weights(corrected)).abs().max() < 1e-6
    # Around the policy that sampled, the second minibatch's weights are of the policy as the first one left it.
    assert result.metrics["policy/is_mean"] == pytest.approx(1.0, abs=1e-5 if proximal == "recomputed" else 1e-3)
    assert result.metrics["policy/is_capped_frac"] == 0.0
    assert result.metrics["policy/ess"] == pytest.approx(1.0, abs=1e-5)


def test_the_recomputed_policy_is_the_one_that_the_step_began_with(engine, trajectory, monkeypatch):
    """Also in its second minibatch, whose weights have moved on: no ratio but those of the moved weights is clipped around."""
    subject = engine(minibatches=2, proximal="recomputed", lr=1e-2)
    groups = groups_of(subject, trajectory, noise=2.0)
    seen = []
    measure = subject._objective.loss
    monkeypatch.setattr(subject._objective, "loss", lambda *given: seen.append(given[1]) or measure(*given))

    subject.train(1, groups)

    first, second = seen
    assert torch.equal(first.start_N, first.now_N)
    assert 1e-4 < (second.start_N - second.now_N).abs().max() < 1.0


def test_what_older_weights_sampled_weighs_by_its_probability_now(engine, trajectory):
    """Capped at 1: tokens that are likelier now count as they are, those less likely count less; the gradient shrinks."""
    groups = None
    norms = {}
    for mode in ("off", "truncate"):
        subject = engine(proximal="recomputed", importance={"mode": mode, "cap": 1.0}, max_grad_norm=1e9)
        groups = groups or groups_of(subject, trajectory, noise=2.0)
        result = subject.train(1, groups)
        norms[mode] = result.metrics["optim/grad_norm"]

    assert norms["truncate"] < norms["off"]
    assert 0.2 < result.metrics["policy/is_capped_frac"] < 0.8
    assert result.metrics["policy/is_mean"] < 1.0
    assert 0.0 < result.metrics["policy/ess"] < 0.9


def test_mismatch_is_told_only_where_a_token_is_fresh_and_never_negative(engine, trajectory):
    subject = engine()
    fresh = subject.train(1, groups_of(subject, trajectory, noise=0.2, version=0)).metrics
    old = subject.train(2, groups_of(subject, trajectory, noise=0.2, version=0)).metrics

    assert fresh["policy/fresh_frac"] == 1.0
    assert pytest.approx(fresh["policy/mismatch_kl"], rel=0.2) == 0.2**2 / 6
    assert old["policy/fresh_frac"] == 0.0
    assert "policy/mismatch_kl" not in old


def test_a_step_without_a_useful_group_has_no_fresh_token(engine, trajectory):
    subject = engine()
    flat = [msgspec.structs.replace(t, reward=1.0) for t in groups_of(subject, trajectory)[0]]

    metrics = subject.train(1, [flat]).metrics

    assert metrics["policy/fresh_frac"] == 0.0
    assert "policy/mismatch_kl" not in metrics


# -- a reference model -----------------------------------------------------------------------------------------------


def test_the_divergence_pulls_back_to_the_reference(engine, trajectory):
    free, held = engine(lr=5e-3), engine(lr=5e-3, kl_coef=5.0)
    before = weights(free)
    groups = groups_of(free, trajectory)
    for step in range(1, 6):
        free.train(step, groups)
        result = held.train(step, groups)

    assert (weights(held) - before).norm() < (weights(free) - before).norm()
    assert result.metrics["policy/kl_ref"] > 0.0
    assert "policy/kl_ref" not in free.train(6, groups).metrics


def test_groups_without_spread_are_held_near_the_reference_too(engine, trajectory):
    subject = engine(kl_coef=1.0)
    groups = groups_of(subject, trajectory)
    subject.train(1, groups)
    flat = [[msgspec.structs.replace(t, reward=1.0) for t in group] for group in groups]

    assert subject.train(2, flat).num_tokens > 0


def test_a_reference_of_another_vocabulary_is_refused(tmp_path, model_folder):
    from tests.jobs import write_model

    train = TrainSection(kl_coef=0.1, reference=str(write_model(tmp_path / "other")))
    subject = TorchTrainEngine(ModelSection(path=str(model_folder)), train, steps=10, seed=1)

    with pytest.raises(TrainError, match="another vocabulary"):
        subject.load(model_folder, None)


# -- overlong --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlong", ["keep", "mask", "penalty"])
def test_what_was_cut_is_kept_masked_or_punished(engine, trajectory, overlong):
    """Both earned the same; the second was cut."""
    subject = engine(overlong=overlong)
    good, cut = groups_of(subject, trajectory)[0][:2]
    group = [msgspec.structs.replace(good, reward=1.0), msgspec.structs.replace(cut, reward=1.0, cut=True)]
    spread = [group[0], msgspec.structs.replace(group[1], reward=0.5)]

    flat_tokens = subject.train(1, [group]).num_tokens
    result = subject.train(2, [spread])

    whole = [len(t.segments[0].mask) for t in spread]
    assert flat_tokens == (sum(whole) if overlong == "penalty" else 0)
    assert result.num_tokens == (whole[0] if overlong == "mask" else sum(whole))
    assert result.metrics["reward/mean"] == pytest.approx(0.75)


# -- one's own loss --------------------------------------------------------------------------------------------------

OWN = """
def dapo(logprobs_N, proximal_N, advantages_N, sequence_N, *, clip_low, clip_high):
    ratio_N = (logprobs_N - proximal_N).exp()
    held_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return -(ratio_N * advantages_N).minimum(held_N * advantages_N)

def one_number(logprobs_N, *rest, **clips):
    return logprobs_N.sum()

def broken(logprobs_N, *rest, **clips):
    return logprobs_N / nothing
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "my_loss.py").write_text(OWN)
    return lambda name: f"{tmp_path / 'my_loss.py'}:{name}"


def test_a_loss_of_ones_own_takes_the_place_of_ours(engine, trajectory, own):
    ours, theirs = engine(), engine(loss=own("dapo"))
    groups = groups_of(ours, trajectory, noise=0.3)

    ours.train(1, groups)
    theirs.train(1, groups)

    assert (weights(ours) - weights(theirs)).abs().max() < 1e-7


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("one_number", r"my_loss.py:one_number returned \(\), not one number with a gradient for each of the \d+ tokens"),
        ("broken", r"my_loss.py:broken raised NameError: name 'nothing' is not defined"),
    ],
)
def test_a_loss_that_is_none_ends_in_one_sentence(engine, trajectory, own, name, sentence):
    subject = engine(loss=own(name))

    with pytest.raises(TrainError, match=sentence):
        subject.train(1, groups_of(subject, trajectory))


def test_a_loss_that_is_not_there_is_named_with_its_key(engine, own):
    with pytest.raises(TrainError, match=r"train.loss: .*my_loss.py defines no dappo. Did you mean dapo\?"):
        engine(loss=own("dappo"))


# -- the whole sum ---------------------------------------------------------------------------------------------------


class Tokens(NamedTuple):
    """Three sequences of 2, 1 and 3 tokens."""

    rows_N = torch.tensor([0, 0, 1, 2, 2, 2])
    behaviour_N = torch.tensor([-1.0, -2.0, -0.5, -1.5, -0.7, -2.5])
    advantages_N = torch.tensor([1.0, 1.0, -0.5, -1.2, -1.2, -1.2])
    fresh_N = torch.zeros(6)
    weights_N = torch.full((6,), 1 / 6)


START = [-0.2, -1.8, -0.9, -1.4, -1.1, -2.0]
REFERENCE = [-0.9, -1.0, -1.1, -1.2, -1.3, -1.4]
NOW = [-0.25, -1.5, -1.3, -1.41, -1.05, -2.2]


def plain(now, mode, level, proximal):
    """w·(PPO's term at the proximal policy - β·k3 to the reference), the mean over tokens, as a loss.

    Around the policy that sampled, PPO's ratio is π/μ: no larger than the cap, or left out.
    """
    tokens, total = Tokens(), 0.0
    rows, behaviour = tokens.rows_N.tolist(), tokens.behaviour_N.tolist()
    for at, advantage in enumerate(tokens.advantages_N.tolist()):
        weighed, log_weight = START if proximal == "recomputed" else NOW, 0.0
        for other, row in enumerate(rows):
            if other == at or (level == "sequence" and row == rows[at]):
                log_weight += weighed[other] - behaviour[other]
        weight = math.exp(log_weight)
        held = min(weight, 1.4) if mode == "truncate" else weight * (weight <= 1.4)
        if proximal == "recomputed":
            factor, ratio = held, math.exp(now[at] - START[at])
        else:
            factor, ratio = held > 0, math.exp(now[at] - behaviour[at]) * (held or weight) / weight
        surrogate = min(ratio * advantage, max(0.8, min(1.28, ratio)) * advantage)
        apart = REFERENCE[at] - now[at]
        total -= factor * (surrogate - 0.1 * (math.exp(apart) - 1.0 - apart))
    return total / len(rows)


@pytest.mark.parametrize(
    ("importance", "expected"),
    [({}, Tokens().behaviour_N.tolist()), ({"mode": "truncate", "cap": 1.4}, None)],
    ids=["as it is", "moved where it is asked for"],
)
def test_a_loss_of_ones_own_gets_the_log_probs_of_the_policy_that_sampled(importance, expected, tmp_path):
    (tmp_path / "my_loss.py").write_text(
        "seen = []\ndef fn(now_N, proximal_N, *rest, **clips):\n    seen.append(proximal_N.tolist())\n    return now_N - now_N.detach()\n"
    )
    given = TrainSection(loss=f"{tmp_path}/my_loss.py:fn", importance=importance)
    subject = Objective(given.resolved(alpha=1, folder=tmp_path))

    subject.loss(Tokens(), Policies(torch.tensor(NOW, requires_grad=True), torch.tensor(START), None), Figures())

    (seen,) = load_object(f"{tmp_path}/my_loss.py:seen")
    moved = [a if n - a <= math.log(1.4) else n - math.log(1.4) for n, a in zip(NOW, Tokens().behaviour_N.tolist(), strict=True)]
    assert seen == pytest.approx(expected or moved)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize(("proximal", "level"), [("recomputed", "token"), ("recomputed", "sequence"), ("behaviour", "token")])
def test_weights_the_clip_and_the_divergence_make_the_objective(mode, proximal, level):
    section = TrainSection(kl_coef=0.1, proximal=proximal, importance={"mode": mode, "level": level, "cap": 1.4})
    now_N = torch.tensor(NOW, requires_grad=True)
    policies = Policies(now_N, torch.tensor(START), torch.tensor(REFERENCE))

    total = Objective(section).loss(Tokens(), policies, Figures())
    total.backward()

    expected = []
    for at in range(len(NOW)):
        moved = ([*NOW[:at], NOW[at] + step, *NOW[at + 1 :]] for step in (1e-6, -1e-6))
        sides = [plain(now, mode, level, proximal) for now in moved]
        expected.append((sides[0] - sides[1]) / 2e-6)
    assert total.item() == pytest.approx(plain(NOW, mode, level, proximal), abs=1e-6)
    assert now_N.grad.tolist() == pytest.approx(expected, abs=1e-6)
