"""What the trainer's publisher knows of who has taken its weights, and what it tells the fabric."""

import pytest

from actors.messages.fabric import PhaseIntent
from actors.messages.weights import WeightsPublished, WeightsTaken
from actors.training.publishing import Publisher
from runtime.actor import Actor


class Trainer(Actor):
    role = "trainer"


@pytest.fixture
def publisher(on_stage):
    """`publisher(play)`: `await play(publisher, told)` with two engines, version 3 of epoch 1 published; `told` is what the fabric heard."""

    def run(play):
        async def main(context):
            told = []

            async def hear(message):
                told.append(message)

            context.actors |= {"engine-1": None, "engine-2": None, "fabric_controller": hear}
            made = Publisher(Trainer(None, context))
            made.published = WeightsPublished(3, 1, "weights", "", 500)
            await play(made, told)

        on_stage(main, name="trainer-1")

    return run


def test_weights_have_arrived_when_the_last_engine_has_this_very_version(publisher):
    async def play(made, told):
        assert not made.taken(WeightsTaken("engine-1", 3, 1))
        assert not made.taken(WeightsTaken("engine-2", 2, 1))
        assert not made.taken(WeightsTaken("engine-2", 3, 0))
        assert made.taken(WeightsTaken("engine-2", 3, 1))

    publisher(play)


def test_the_fabric_hears_of_the_next_weights_ahead_of_time_with_their_bytes(publisher):
    async def play(made, told):
        await made.intend("weight_sync", 4, in_s=1.5)

        traffic = (("trainer-1", "engine-1", 500), ("trainer-1", "engine-2", 500))
        assert told == [PhaseIntent("weight_sync", 4, 1.5, traffic)]

    publisher(play)


def test_before_anything_was_published_no_bytes_are_promised(publisher):
    async def play(made, told):
        made.published = None
        await made.intend("weight_sync", 0)

        assert told == [PhaseIntent("weight_sync", 0, 0.0, ())]

    publisher(play)
