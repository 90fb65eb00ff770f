"""The safeguards that mutations remove are still in the code; test_seeds shows that each is missed."""

import pytest

from rubato.sim.simtest import mutations


@pytest.mark.parametrize("name", mutations.MUTATIONS)
def test_every_mutation_still_finds_the_safeguard_that_it_removes(name):
    with mutations.applied(name):
        for edit in mutations.MUTATIONS[name].edits:
            assert edit.owner.__dict__[edit.method].__code__.co_filename.startswith("<mutated")
