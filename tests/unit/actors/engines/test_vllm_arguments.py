"""How our sections become vLLM's arguments; needs vLLM, but starts no engine."""

from pathlib import Path

import pytest

from rubato.actors.config import ModelSection
from rubato.actors.engines.engine import EngineError
from rubato.actors.engines.section import EngineSection

# vLLM and what it imports warn in many places of their own
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


def arguments(**options):
    pytest.importorskip("vllm")
    from rubato.actors.engines import vllm_launch

    return vllm_launch.arguments(Path("/model"), ModelSection(), EngineSection(kind="vllm", vllm=options))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("max_num_seqs", "set engine.num_slots instead"),
        ("enforce_eager", "set engine.enforce_eager instead"),
        ("logprobs_mode", "needs it to be 'processed_logprobs'"),
        ("block_sise", "did you mean block_size"),
    ],
)
def test_an_argument_that_is_not_the_users_to_set_is_refused_with_the_way_out(name, sentence):
    with pytest.raises(EngineError, match=sentence):
        arguments(**{name: 1})


def test_further_arguments_reach_vllm_and_ours_stand():
    found = arguments(block_size=64)

    assert (found.enforce_eager, found.block_size) == (True, 64)  # on CPU there are no graphs
    assert (found.max_num_seqs, found.logprobs_mode) == (EngineSection().num_slots, "processed_logprobs")
