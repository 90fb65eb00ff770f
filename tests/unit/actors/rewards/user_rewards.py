"""Reward functions as users write them."""

import sys
import time


def lengths(completions, **columns):
    return [float(len(text)) for text in completions]


async def from_columns(completions, answer, turns, texts, **columns):
    return [float(a or 0) + t + len(x) for a, t, x in zip(answer, turns, texts, strict=True)]


def picky(completions, **columns):
    if "bad" in completions:
        raise KeyError("bad")
    return [1.0] * len(completions)


def hang(completions, **columns):
    while True:
        pass


def leave(completions, **columns):
    sys.exit(4)


def short(completions, **columns):
    return [1.0]


def nan(completions, **columns):
    return [float("nan")] * len(completions)


def words(completions, **columns):
    return ["one"] * len(completions)


def scalar(completions, **columns):
    return 1.0


def strict(completions, row, task):
    return [float(number) for number in row]


def slow(completions, seconds, worth, **columns):
    time.sleep(sum(seconds))  # noqa: TID251
    return [float(number) for number in worth]
