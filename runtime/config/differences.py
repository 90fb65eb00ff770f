"""Where two resolved configs differ, in sentences."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from rubato.runtime.config.source import MAX_SHOWN, Tree


class ChangedKey(NamedTuple):
    """A dotted key whose value was `old` and is `new`; None on the side that lacks it."""

    key: str
    old: Any
    new: Any

    def sentence(self, form: str) -> str:
        """`form` with its {key}, {old} and {new}; addresses are not spelt out, for one may hold a password."""
        return form.format(key=self.key, old=_briefly(self.old), new=_briefly(self.new))


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[ChangedKey]:
    """Every key on which two resolved trees differ, in the order of `old`."""
    found: list[ChangedKey] = []
    for key in dict.fromkeys([*old, *new]):
        ours, theirs = old.get(key), new.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            inner = differing(cast("Tree", ours), cast("Tree", theirs))
            found += [each._replace(key=f"{key}.{each.key}") for each in inner]
        elif ours != theirs:
            found.append(ChangedKey(key, ours, theirs))
    return found


def _briefly(value: Any) -> str:
    text = "not set" if value in (None, "", [], {}) else str(value).lower() if isinstance(value, bool) else str(value)
    return "another address" if "://" in text else text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
