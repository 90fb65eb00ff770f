"""Turns what pydantic found wrong into sentences that name the key, the value given and what is allowed."""

import difflib
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rubato.runtime.config.source import ConfigSource, Keys

MAX_SENTENCES = 5

WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "empty",
    list: "a list",
    tuple: "a list",
    dict: "key: value pairs",
}

SECTION = "a section of key: value pairs"

BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def sentences(error: ValidationError, source: ConfigSource, root: type[BaseModel]) -> list[str]:
    """One sentence per mistake, at most `MAX_SENTENCES`; unknown keys first, since they explain missing ones."""
    details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    known = dict(_known(root, ()))
    found: list[str] = []
    for detail in details:
        if detail["type"] == "too_short" and _wrong_within(detail, details):
            continue  # an item that is wrong is not counted
        keys = tuple(str(part) for part in detail["loc"])
        sentence = source.sentence(keys, _sentence(detail, keys, known, source))
        if sentence not in found:
            found.append(sentence)
    return found[:MAX_SENTENCES]


def _wrong_within(outer: ErrorDetails, details: list[ErrorDetails]) -> bool:
    """Whether something inside of what `outer` is about is wrong too."""
    depth = len(outer["loc"])
    return any(len(detail["loc"]) > depth and detail["loc"][:depth] == outer["loc"] for detail in details)


def _sentence(detail: ErrorDetails, keys: Keys, known: Mapping[Keys, FieldInfo], source: ConfigSource) -> str:
    name, shown = ".".join(keys), source.shown(keys, detail["input"])
    if detail["type"] == "extra_forbidden":
        near = nearest(keys, known)
        if near:
            return f"{name} is not a key. Did you mean {'.'.join(near)}?"
        if len(keys) == 1 and isinstance(detail["input"], dict):
            return f"{name} is not a key: no role under actors reads it. Is one missing there?"
        beside = [key[-1] for key in known if len(key) == len(keys) and key[:-1] == _matched(keys[:-1], key[:-1])]
        whose = ".".join(keys[:-1])
        return f"{name} is not a key" + (f". {whose} has {', '.join(beside)}." if whose and beside else ".")
    if detail["type"] == "missing":
        return f"{name} is missing."
    if detail["type"] in ("value_error", "assertion_error"):
        reason = str(detail.get("ctx", {}).get("error", detail["msg"])).rstrip(".")
        reason += "" if reason.endswith("?") else "."
        return f"{name}: {reason}" if name else reason
    if detail["type"] in ("too_short", "too_long"):
        return f"{name} is {shown}; it must have {_size(detail)}."
    field = next((field for pattern, field in known.items() if _matched(keys, pattern) == pattern), None)
    wanted = allowed(field) if field is not None else _bound(detail)
    must = f"it must be {wanted}" if wanted else _plain(detail["msg"])
    return f"{name} is {shown}; {must}{_advice(detail)}."


def nearest(keys: Keys, known: Collection[Keys]) -> Keys | None:
    """The known key that an unknown one was most likely meant to be: a sibling first, then the same last word elsewhere."""
    beside = {k[len(keys) - 1]: k for k in known if len(k) == len(keys) and k[:-1] == _matched(keys[:-1], k[:-1])}
    close = difflib.get_close_matches(keys[-1], beside, n=1)
    if close:
        return (*keys[:-1], close[0])
    written, names = ".".join(keys), {".".join(k): k for k in known}
    close = difflib.get_close_matches(written, names, n=1, cutoff=0.75)
    if close:
        return names[close[0]]
    elsewhere = {k[-1]: k for k in reversed([*known])}
    close = difflib.get_close_matches(keys[-1], elsewhere, n=1, cutoff=0.75)
    return elsewhere[close[0]] if close else None


def _matched(given: Keys, pattern: Keys) -> Keys:
    """`pattern` itself where `given` fits it; `*` stands for any key."""
    fits = len(given) == len(pattern) and all(p in ("*", g) for g, p in zip(given, pattern, strict=True))
    return pattern if fits else ("",)


def _known(model: type[BaseModel], above: Keys) -> Iterator[tuple[Keys, FieldInfo]]:
    """Every key that there may be; `*` stands for any name."""
    for name, field in model.model_fields.items():
        keys = (*above, field.alias or name)
        yield keys, field
        for inner, starred in models(field.annotation):
            yield from _known(inner, (*keys, "*") if starred else keys)


def models(annotation: Any) -> list[tuple[type[BaseModel], bool]]:
    """Models reachable from an annotation; True where they are values of a dict."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(annotation, False)]
    starred = get_origin(annotation) is dict
    inner = get_args(annotation)
    return [(model, starred or deeper) for part in inner for model, deeper in models(part)] if inner else []


def allowed(field: FieldInfo) -> str:
    """What values a key takes, in words."""
    words = _words(field.annotation)
    bounds: list[str] = []
    for part in cast("list[object]", field.metadata):
        bounds += [f"{word} {_number(getattr(part, name))}" for name, word in BOUNDS.items() if hasattr(part, name)]
        pattern, length = getattr(part, "pattern", None), getattr(part, "max_length", None)
        bounds += [f"matching {pattern}"] if pattern else []
        bounds += [f"at most {length} long"] if length else []
    return words + (" " + " and ".join(bounds) if words and bounds else "")


def _size(detail: ErrorDetails) -> str:
    """How many items a list or mapping may have."""
    limits = detail.get("ctx", {})
    word, num = ("at least", limits["min_length"]) if "min_length" in limits else ("at most", limits["max_length"])
    return f"{word} {num} {'item' if num == 1 else 'items'}"


def _bound(detail: ErrorDetails) -> str:
    """What an item of a list must be, or the bound that it is beyond; empty where that is not what is wrong."""
    if detail["type"] == "model_type":
        return SECTION
    limits = detail.get("ctx", {})
    return next((f"{word} {_number(limits[name])}" for name, word in BOUNDS.items() if name in limits), "")


def _words(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(filter(None, (_words(part) for part in get_args(annotation))))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return SECTION
    return WORDS.get(cast("object", origin or annotation), "")


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(message: str) -> str:
    return message[:1].lower() + message[1:].rstrip(".")


def _advice(detail: ErrorDetails) -> str:
    """What would make of the value what was most likely meant."""
    value = detail["input"]
    if detail["type"] == "word_for_truth":
        return detail.get("ctx", {}).get("advice", "")
    if detail["type"] == "string_type" and isinstance(value, int | float | list):
        return ". Put it in quotes"
    return ""
