"""Environments as users write them: plain, async, and broken in every way."""

import asyncio
import contextlib
import os
import threading
from decimal import Decimal
from fractions import Fraction


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


class Told(Plain):
    """Returns what the action says."""

    def step(self, action):
        names = {"np": __import__("numpy"), "torch": __import__("torch"), "Fraction": Fraction, "Decimal": Decimal}
        return eval(action, names)


class Deaf(Async):
    """Hangs in one method, and lets nothing end it that is named."""

    def __init__(self, method="step", swallows="CancelledError"):
        super().__init__()
        self.method = method
        self.swallowed = {"CancelledError": asyncio.CancelledError, "BaseException": BaseException}[swallows]

    async def _hang(self, method):
        while self.method == method:
            with contextlib.suppress(self.swallowed):
                await asyncio.sleep(1000)

    async def reset(self, *, seed):
        await self._hang("reset")
        return await super().reset(seed=seed)

    async def step(self, action):
        await self._hang("step")
        return await super().step(action)

    async def close(self):
        await self._hang("close")


class Shielded(Async):
    async def step(self, action):
        return await asyncio.shield(asyncio.sleep(1000))


class Ends(Async):
    """Raises in one method what is no Exception, before anything is awaited or after."""

    def __init__(self, method, error, awaits=False):
        self.method, self.awaits = method, awaits
        self.error = {"GeneratorExit": GeneratorExit, "KeyboardInterrupt": KeyboardInterrupt}.get(error, BaseException)
        self._end("__init__")
        super().__init__()

    def _end(self, method):
        if self.method == method:
            raise self.error

    async def _later(self, method, result):
        await asyncio.sleep(0)
        self._end(method)
        return result

    def reset(self, *, seed):
        return self._later("reset", ("x", {})) if self.awaits else self._end("reset") or ("x", {})

    def step(self, action):
        result = "x", 1.0, True, False, {}
        return self._later("step", result) if self.awaits else self._end("step") or result

    def close(self):
        return self._later("close", None) if self.awaits else self._end("close")


class CancelsItself(Async):
    async def step(self, action):
        raise asyncio.CancelledError


class Blocks(Async):
    """Stands in for a call that does not await."""

    def __init__(self, method="step"):
        super().__init__()
        self.method = method

    def _block(self, method):
        if method == self.method:
            threading.Event().wait(0.3)

    async def reset(self, *, seed):
        self._block("reset")
        return await super().reset(seed=seed)

    async def step(self, action):
        await asyncio.sleep(0)
        self._block("step")
        return await super().step(action)

    async def close(self):
        self._block("close")


not_a_class = 3
