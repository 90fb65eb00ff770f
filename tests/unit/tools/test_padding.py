"""The hook of tools/bench/padding.py, started by `train.hooks: [tools/bench/padding.py:PadShare]`: the shares that it computes."""

import pytest

from tools.bench.padding import shares


@pytest.mark.parametrize(
    ("lengths", "batch", "attention"),
    [
        pytest.param([8, 8, 8], 0.0, 0.0, id="equally long"),
        pytest.param([8, 2], 6 / 16, 0.0, id="too unlike for one bucket"),
        pytest.param([8, 6], 2 / 16, 2 / 16, id="alike enough for one bucket"),
    ],
)
def test_the_shares_of_padding_are_of_what_is_computed(lengths, batch, attention):
    found = shares(lengths, 64)

    assert found["padding/batch"] == pytest.approx(batch)
    assert found["padding/attention"] == pytest.approx(attention)
