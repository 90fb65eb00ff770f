"""What users do to a worker process, the worst included."""

import asyncio
import ctypes
import os
import sys


class Well:
    """Behaves."""

    def __init__(self, start=0):
        self.value = start

    def add(self, number):
        self.value += number
        return self.value

    async def add_later(self, number):
        await asyncio.sleep(0)
        return self.add(number)

    def hang(self):
        while True:
            pass

    def pid(self):
        return os.getpid()


class BrokenInit:
    def __init__(self):
        raise KeyError("goal")


def hang():
    while True:
        pass


def leave():
    sys.exit(3)


def crash():
    ctypes.string_at(0)


def big(size):
    return "x" * size


def fail():
    raise ValueError("no such map")


def nan():
    return float("nan")


def strange():
    return {"set": object(), "fine": 1}


def circle():
    found = []
    found.append(found)
    return found


def shout(text, lines=1):
    for _ in range(lines):
        print(text)
    print("and on stderr", file=sys.stderr)


def gulp(mb):
    return len(bytearray(mb << 20))


def safe_path():
    return sys.flags.safe_path


def modules():
    return [name for name in ("numpy", "torch", "asyncio", "pydantic") if name in sys.modules]


def fork_and_return():
    """Leaves a child behind that holds every descriptor."""
    child = os.fork()
    if child == 0:
        while True:
            pass
    return [os.getpid(), child]


class BrokenRepr(Exception):
    def __repr__(self):
        raise RuntimeError


def fail_badly():
    raise BrokenRepr
