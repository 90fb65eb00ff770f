"""What is stored is read under the names that runs of before have, whatever the code calls it now."""

import msgspec
import pytest

from rubato.actors.checkpoints.checkpoint import TERM, Manifest
from rubato.actors.checkpoints.mirror import CLAIMED, Claim
from rubato.actors.fabric.reconciler import CircuitRecord
from rubato.actors.samples import buffer
from rubato.actors.samples.group import Training
from rubato.actors.scripted import train_engine


@pytest.mark.parametrize(
    ("record", "stored"),
    [
        (Training(term=3, raised_term=2), {"epoch": 3, "raised_epoch": 2}),
        (Manifest(step=4, term=3, files={}), {"step": 4, "epoch": 3, "files": {}}),
        (train_engine._State(step=4, term=3), {"step": 4, "epoch": 3}),
        (CircuitRecord(change=7), {"epoch": 7, "stage": "committed"}),
    ],
)
def test_a_term_is_stored_as_epoch(record, stored):
    content = msgspec.to_builtins(record)

    assert stored.items() <= content.items()
    assert msgspec.convert(content, type(record)) == record


def test_counters_marks_and_claims_have_the_names_of_before():
    claim = CLAIMED.fullmatch("epoch_3.9f2c61aa")

    assert (buffer.TERM, TERM) == ("samples/epoch", "epoch")
    assert claim is not None
    assert Claim(int(claim[1]), claim[2]).name == "epoch_3.9f2c61aa"
