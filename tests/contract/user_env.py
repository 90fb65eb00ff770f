"""Environments as users write them: plain, async, and broken in every way."""

import asyncio
import os


class Plain:
    def __init__(self, goal=3):
        self.goal = goal
        self.position = 0

    def reset(self, *, seed):
        self.position = 0
        self.seed = seed
        return f"at 0, task {seed}", {"goal": self.goal}

    def step(self, action):
        self.position += 1
        return f"at {self.position}, task {self.seed}", 0.5, self.position >= self.goal, False, {}

    def close(self):
        print("closed")


class WithSplit(Plain):
    held_out = {"goal": 1}


class Disjoint(Plain):
    held_out = {}


class WrongSplit(Plain):
    held_out = ["goal"]


class Async(Plain):
    async def reset(self, *, seed):
        await asyncio.sleep(0)
        return super().reset(seed=seed)

    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)

    async def close(self):
        await asyncio.sleep(0)


class Messages(Plain):
    def reset(self, *, seed):
        text, info = super().reset(seed=seed)
        return [{"role": "system", "content": "walk"}, {"role": "user", "content": text}], info


class ExitsAsync(Async):
    async def step(self, action):
        raise SystemExit(7)


class RaisesInInit(Plain):
    def __init__(self):
        raise KeyError("goal")


class RaisesInReset(Plain):
    def reset(self, *, seed):
        raise KeyError("goal")


class FussyReset(Plain):
    """Of tasks with other seeds than 4214."""

    def reset(self, *, seed):
        if seed != 4214:
            raise KeyError("goal")
        return super().reset(seed=seed)


class RaisesInStep(Plain):
    def step(self, action):
        raise KeyError("goal")


class HangsInReset(Plain):
    def reset(self, *, seed):
        while True:
            pass


class HangsInStep(Plain):
    def step(self, action):
        while True:
            pass


class HangsAsync(Async):
    async def step(self, action):
        await asyncio.sleep(1000)


class Exits(Plain):
    def step(self, action):
        os._exit(7)


class WrongShape(Plain):
    def step(self, action):
        return "x", 1.0, True


class NaN(Plain):
    def step(self, action):
        return "x", float("nan"), False, False, {}


class Tensor(Plain):
    def step(self, action):
        return object(), 1.0, False, False, {}


class Huge(Plain):
    def step(self, action):
        return "x" * (11 << 20), 1.0, False, False, {}


not_a_class = 3
