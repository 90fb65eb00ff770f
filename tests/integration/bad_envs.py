"""Environments as users get them wrong, one class per mistake."""

import asyncio
import random


class Good:
    def reset(self, *, seed):
        return "go", {}

    def step(self, action):
        return "go", 0.0, False, False, {}

    def close(self):
        pass


class Uneven(Good):
    """Nothing wrong with it: rewards differ, so that there is something to train on."""

    inline = True

    def step(self, action):
        return "go", random.random(), False, False, {}


class RaisesInReset(Good):
    def reset(self, *, seed):
        raise KeyError("goal")


class RaisesInStep(Good):
    def step(self, action):
        raise ZeroDivisionError("no more moves")


class HangsInReset(Good):
    async def reset(self, *, seed):
        await asyncio.Event().wait()


class HangsInStep(Good):
    async def step(self, action):
        await asyncio.Event().wait()


class BlocksInReset(Good):
    def reset(self, *, seed):
        while True:
            pass


class ReturnsOneValue(Good):
    def reset(self, *, seed):
        return "go"


class ReturnsFourValues(Good):
    def step(self, action):
        return "go", 0.0, False, {}


class RewardsNan(Good):
    def step(self, action):
        return "go", float("nan"), False, False, {}


class WantsAnArgument(Good):
    def __init__(self, level):
        self.level = level
