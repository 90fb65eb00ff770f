"""Judges how far engines' log-probabilities may be from the trainer's for the same tokens, and names what most likely parts them."""

from collections.abc import Sequence

PATIENCE = 5
"""Steps in a row: one batch of rare tokens says nothing."""

MOST_KL = {"float32": 1e-3, "bfloat16": 1e-2}
"""Nats per token between two computations of the same weights; rounding alone stays a tenfold below."""


def begins_to_part(mismatch_kl: Sequence[float], most: float) -> bool:
    """Whether the newest `PATIENCE` values of `policy/mismatch_kl` are all above `most`, and the one before them was not."""
    newest = mismatch_kl[-PATIENCE - 1 :]
    return len(newest) == PATIENCE + 1 and newest[0] <= most < min(newest[1:])


def why_parted(kl: float, most: float, *, compared: bool) -> str:
    """What the user is told when it begins; `compared`: on prompts of their own, trainer and engines agreed just now."""
    told = (
        f"policy/mismatch_kl has been above {most:g} for {PATIENCE} steps, {kl:.1e} now: "
        "engines sample from another policy than is trained. "
    )
    if compared:
        return told + (
            "On fresh prompts they agree, so rollouts most likely go on with KV caches of older weights: "
            "set engine.kv_on_update=recompute"
        )
    return told + (
        "Most likely the engines' weights, dtype or temperature differ from the trainer's: check.enabled=true finds out which"
    )


def why_apart(engine: str, *, agreed_before: bool, agrees_at_1: bool, temperature: float) -> str:
    """The likely cause where `engine` and the trainer differ; `agrees_at_1`: not where the trainer takes temperature 1."""
    if agrees_at_1:
        return (
            f"{engine} gives log-probs of temperature 1: they must be of the distribution sampled from, "
            f"at rollout.temperature={temperature:g}."
        )
    if agreed_before:
        return f"They agreed before this update, so its weights most likely never reached {engine}, or not whole: see its log."
    return "Check that both load the same model folder, and compute in the same dtype."
