"""How a token is drawn, and what log-probability is reported for it."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from rubato.actors.engines.engine import Work
from rubato.actors.engines.runner import draws_of
from rubato.actors.engines.runner import sample as sample_array
from rubato.actors.engines.scheduler import Sequence, key_of, uniform
from rubato.actors.messages.generation import Sampling

LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1, 0.0]]))


def draw(temperature: float, top_p: float, number: float) -> tuple[float, float, float]:
    return (temperature, top_p, number)


def sample(logits, draws):
    return sample_array(logits, np.array(draws, np.float32))


def drawn(temperature: float, top_p: float, num: int = 4000) -> Counter:
    draws = [draw(temperature, top_p, uniform(key_of(1, "s"), i)) for i in range(num)]
    ids, _ = sample(LOGITS.repeat(num, 1), draws)
    return Counter(ids)


def test_greedy_takes_the_most_probable_token_whatever_the_number_says():
    ids, logprobs = sample(LOGITS, [draw(0.0, 1.0, 0.999)])

    assert ids == [0]
    assert math.isclose(logprobs[0], math.log(0.5), rel_tol=1e-6)


def test_tokens_come_as_often_as_they_are_probable_and_never_with_probability_zero():
    counts = drawn(1.0, 1.0)

    assert abs(counts[0] / 4000 - 0.5) < 0.03
    assert abs(counts[2] / 4000 - 0.15) < 0.03
    assert counts[4] == 0


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.7), (2.0, 0.8)], ids=str)
def test_logprobs_are_of_the_distribution_that_tokens_are_drawn_from(temperature, top_p):
    draws = [draw(temperature, top_p, uniform(key_of(1, "s"), i)) for i in range(4000)]

    ids, logprobs = sample(LOGITS.repeat(4000, 1), draws)

    counts = Counter(ids)
    said = dict(zip(ids, logprobs, strict=True))
    assert all(abs(counts[token] / 4000 - math.exp(said[token])) < 0.03 for token in counts)
    assert math.fsum(math.exp(value) for value in said.values()) == pytest.approx(1.0, abs=1e-5)


def test_a_greedy_row_has_its_logprob_at_temperature_1_and_over_the_whole_vocabulary():
    alone, logprobs = sample(LOGITS, [draw(0.0, 0.5, 0.999)])

    among, mixed = sample(LOGITS.repeat(3, 1), [draw(0.0, 0.5, 0.9), draw(0.3, 1.0, 0.9), draw(1.0, 0.5, 0.9)])

    assert alone == [0] == among[:1]
    assert logprobs[0] == pytest.approx(math.log(0.5)) == mixed[0]


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    assert set(drawn(1.0, 0.7)) == {0, 1}
    assert set(drawn(1.0, 0.01)) == {0}


def test_rows_of_one_batch_keep_their_own_settings():
    draws = [draw(0.0, 1.0, 0.99), draw(1.0, 1.0, 0.99), draw(1.0, 0.4, 0.99)]

    ids, _ = sample(LOGITS.repeat(3, 1), draws)

    assert ids == [0, 3, 0]


def test_a_row_draws_the_same_alone_and_among_others():
    draws = [draw(1.0, 1.0, uniform(7, i)) for i in range(50)]

    together, _ = sample(LOGITS.repeat(50, 1), draws)
    alone = [sample(LOGITS, [draw])[0][0] for draw in draws]

    assert together == alone


def test_the_largest_number_still_names_a_token():
    ids, _ = sample(LOGITS, [draw(1.0, 1.0, 1 - 2.0**-24)])

    assert ids == [3]


def test_the_number_depends_on_seed_session_and_position_alone():
    numbers = {uniform(key_of(seed, session), i) for seed in (1, 2) for session in "ab" for i in range(100)}

    assert len(numbers) == 400
    assert all(0 <= number < 1 for number in numbers)
    assert uniform(key_of(1, "a"), 5) == uniform(key_of(1, "a"), 5)


def test_the_numbers_of_a_batch_are_those_of_its_rows():
    works = [Work(f"r{i}", f"s{i}", (1, 2, 3)[: 1 + i % 3], Sampling(4, 0.5 + i, 0.9, seed=i)) for i in range(20)]
    sequences = [Sequence(work, 100) for work in works]

    draws = draws_of(sequences)

    assert draws[:, 2].tolist() == [uniform(s.key, len(s.tokens)) for s in sequences]
    assert draws[:, 0].tolist() == [0.5 + i for i in range(20)]
