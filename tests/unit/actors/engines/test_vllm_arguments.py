"""How our sections become vLLM's arguments; needs vLLM, but starts no engine."""

from pathlib import Path

import pytest

from actors.config import ModelSection
from actors.engines.engine import EngineError
from actors.engines.section import EngineSection

# vLLM and what it imports warn in many places of their own
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


def arguments(**options):
    pytest.importorskip("vllm")
    from actors.engines import vllm_launch

    return vllm_launch.arguments(Path("/model"), ModelSection(), EngineSection(kind="vllm", vllm=options))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("max_num_seqs", "set engine.num_slots instead"),
        ("logprobs_mode", "needs it to be 'processed_logprobs'"),
        ("enforce_eagr", "did you mean enforce_eager"),
    ],
)
def test_an_argument_that_is_not_the_users_to_set_is_refused_with_the_way_out(name, sentence):
    with pytest.raises(EngineError, match=sentence):
        arguments(**{name: 1})


def test_further_arguments_reach_vllm_and_ours_stand():
    found = arguments(enforce_eager=False, block_size=64)

    assert (found.enforce_eager, found.block_size) == (False, 64)
    assert (found.max_num_seqs, found.logprobs_mode) == (EngineSection().num_slots, "processed_logprobs")
