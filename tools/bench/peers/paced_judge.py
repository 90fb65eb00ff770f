"""A reward model that is paced: a call lasts what the model's prefill of so many trajectories takes on one GPU, times SCALE."""

import asyncio
from typing import Any

SCALE = 4.0
TOKENS = 160
"""Of a trajectory, about: its prompt and what the engine wrote."""

PREFILL_S = 0.0041706
"""Roofline.prefill_s(TOKENS) of qwen2.5-7b on one H800, seconds; a test compares. A worker process imports no more than this file."""


async def judge(completions: list[str], **columns: Any) -> list[float]:
    """One trajectory after another occupies the slot; what they are worth is nothing to this bench."""
    await asyncio.sleep(SCALE * PREFILL_S * len(completions))
    return [float(len(text) % 2) for text in completions]
