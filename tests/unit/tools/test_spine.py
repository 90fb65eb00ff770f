"""tools/spine.py: which words count, that its bounds only fall, and that the spine keeps the one on mentions."""

import itertools

import pytest

from tools import spine


def test_the_spine_says_no_more_of_mechanisms_than_its_bound_allows():
    said = spine.mentions()

    assert len(said) == 12
    assert sum(said.values()) <= spine.BOUNDS["mentions"][-1], said


@pytest.mark.parametrize("figure", spine.BOUNDS)
def test_a_new_bound_is_lower_than_the_one_before(figure):
    assert all(later < earlier for earlier, later in itertools.pairwise(spine.BOUNDS[figure]))


def test_words_are_found_in_names_of_every_form_and_not_within_others():
    text = "self._affinity AffinityPicker with_permit, HTTPPermit; removed permittivity LLMProxy"

    assert list(spine.words_of(text)) == [
        "self", "affinity", "affinity", "picker", "with", "permit", "http", "permit", "removed", "permittivity", "llm", "proxy",
    ]  # fmt: skip


def test_a_module_has_the_file_that_a_reader_opens():
    assert spine.file_of("rubato.planning.routing") == spine.ROOT / "planning/routing.py"
    assert spine.file_of("rubato.runtime.config") == spine.ROOT / "runtime/config/__init__.py"
    assert spine.file_of("rubato.planning.nowhere") is None
    assert spine.file_of("rubato.runtime.launch") is None  # an empty file is none
