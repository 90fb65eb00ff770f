"""Environments as users get them wrong, one class per mistake."""

import asyncio
import os
import random
import threading


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


class FourInSeven(Good):
    """Of seven tasks one raises, one hangs, one pays NaN and one exits; the other three are played, which takes longer than failing."""

    def reset(self, *, seed):
        self.kind = seed % 7
        return f"task {self.kind}", {}

    def step(self, action):
        if self.kind == 0:
            raise ZeroDivisionError("no more moves")
        if self.kind == 1:
            threading.Event().wait()
        if self.kind == 2:
            return "go", float("nan"), False, False, {}
        if self.kind == 3:
            os._exit(3)
        threading.Event().wait(0.02)
        return "go", random.random(), False, False, {}


class FailsOnOneSeed(Uneven):
    """The very seed that is tried first."""

    inline = False

    def reset(self, *, seed):
        if seed == 1:
            raise KeyError("goal")
        return "go", {}
