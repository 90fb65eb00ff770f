"""Which cores vLLM's ranks are bound to; the environment variable is vLLM's."""

import pytest

from rubato.actors.engines.engine import EngineError
from rubato.actors.engines.vllm_launch import bound, cores


@pytest.mark.parametrize(
    ("given", "own", "degree", "taken"),
    [
        ("0|1", {0}, 1, "0"),
        ("0|1", {1}, 1, "1"),
        ("0|1", {1}, 2, "0|1"),
        ("0-1|2-3|4-5|6-7", {4, 5}, 2, "4-5|6-7"),
        ("0-1|2-3|4-5|6-7", {6, 7}, 1, "6-7"),
        ("0|1|2", {2}, 2, "1|2"),
        ("8|9", {0}, 1, "8"),
        ("nobind", {0}, 1, "nobind"),
        ("auto", {0}, 2, "auto"),
    ],
)
def test_each_engine_takes_the_parts_with_its_own_cores(given, own, degree, taken):
    assert bound(given, own, degree) == taken


def test_a_part_is_a_list_of_cores():
    assert cores("0,2-4") == {0, 2, 3, 4}
    with pytest.raises(EngineError, match="VLLM_CPU_OMP_THREADS_BIND has 'x', which is no list of cores"):
        cores("x")
