"""What a worker says of an error in user code."""

from pathlib import Path

import pytest

from rubato.runtime.pool.values import text_of


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: Path("/no/such/goals.json").read_text(), "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/goals.json'"),
        (lambda: Path("/").read_text(), "IsADirectoryError: [Errno 21] Is a directory: '/'"),
        (lambda: {}["goal"], "KeyError('goal')"),
    ],
)  # fmt: skip
def test_an_error_about_a_file_keeps_its_name(act, said):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any kind
        act()

    assert text_of(caught.value) == said
