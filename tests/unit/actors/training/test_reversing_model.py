import json
import random
from itertools import islice
from pathlib import Path

from rubato.actors.training import base_model, reversing_model

DATA = Path(__file__).parents[4] / "examples" / "reverse.jsonl"


def test_it_is_shown_copies_and_fewer_reverses_of_texts_whose_symbols_are_a_token_each():
    tokenizer = base_model.make_tokenizer()
    reversed_ones = 0
    for shown in islice(reversing_model.conversations(random.Random(1)), 500):
        text, answer = shown.removesuffix(base_model.END).split(base_model.ASSISTANT)
        assert answer in (text, text[::-1])
        assert len(tokenizer.encode(text).ids) == len(text) in range(16, 21)
        reversed_ones += answer != text
    assert 50 < reversed_ones < 130


def test_the_data_set_asks_for_reverses_of_such_texts():
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]

    assert len({row["text"] for row in rows}) == len(rows) == 600
    assert all(row["reversed"] == row["text"][::-1] for row in rows)
    assert all(16 <= len(row["text"]) <= 20 and set(row["text"]) <= set(reversing_model.SYMBOLS) for row in rows)


def test_each_maker_s_models_are_kept_apart():
    assert base_model.cache_entry(1, reversing_model.make) != base_model.cache_entry(1)
    assert base_model.cache_entry(1, reversing_model.make) == base_model.cache_entry(1, reversing_model.make)
