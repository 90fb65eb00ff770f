"""How old what was sampled is, by digests of sampled sequences."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from rubato.actors.gateway.tinker.wire import last_of
from rubato.actors.messages.tinker import Datum, ForwardBackward

BY_SAMPLES = frozenset({"importance_sampling", "ppo", "cispo", "dro", "gspo"})
"""Losses of policy gradients."""


class Under(NamedTuple):
    """The weights that a sequence was sampled under; an empty `model` is the base model."""

    model: str
    oldest: int
    newest: int


class Judged(NamedTuple):
    """What is known of the sequences of one request; `flaw` is the sentence by which it is refused."""

    flaw: str = ""
    num_known: int = 0
    num_unknown: int = 0
    oldest: int | None = None
    newest: int | None = None

    def __add__(self, other: tuple[object, ...]) -> "Judged":
        assert isinstance(other, Judged)
        olds = [each for each in (self.oldest, other.oldest) if each is not None]
        news = [each for each in (self.newest, other.newest) if each is not None]
        return Judged(
            "", self.num_known + other.num_known, self.num_unknown + other.num_unknown, min(olds, default=None), max(news, default=None)
        )

    def metrics(self, *, reduced: bool) -> dict[str, float]:
        """With the SDK's word for how parts of a batch are put together, or without it."""
        if not self.num_known + self.num_unknown:
            return {}
        told = {"unknown_frac": ("mean", self.num_unknown / (self.num_known + self.num_unknown))}
        if self.oldest is not None and self.newest is not None:
            told |= {"version_min": ("min", self.oldest), "version_max": ("max", self.newest)}
        return {f"rubato/{name}" + (f":{how}" if reduced else ""): float(value) for name, (how, value) in told.items()}


class Ages:
    """Remembers as many as it may, the newest ones."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[bytes, Under] = {}

    def note(self, prompt: bytes, sampled: bytes, name: str, under: Under) -> None:
        """A sequence was sampled, which clients know by `name`."""
        if self._most:
            for key in (_digest(prompt, sampled), _digest(name.encode())):
                self._known.pop(key, None)
                self._known[key] = under
            while len(self._known) > 2 * self._most:
                del self._known[next(iter(self._known))]

    def judged(self, model: str, version: int, alpha: int | None, asked: ForwardBackward, names: Sequence[Sequence[str]]) -> Judged:
        """Of a request to the model, which stands at `version`; `names` are of the sampled sequences that each datum says it is made of."""
        if asked.loss not in BY_SAMPLES:
            return Judged()
        found = Judged()
        for number, datum in enumerate(asked.data):
            known = [each for each in self._of(datum, names[number] if number < len(names) else ()) if each.model == model]
            if not known:
                found += Judged(num_unknown=1)
                continue
            oldest, newest = min(each.oldest for each in known), max(each.newest for each in known)
            if alpha is not None and (age := version - oldest) > alpha:
                return Judged(
                    f"data[{number}] was sampled under version {oldest} of the model, which stands at version {version} when it is trained: "
                    f"its age is {age}, and tinker.alpha={alpha} allows no more than that"
                )
            found += Judged("", 1, 0, oldest, newest)
        return found

    def _of(self, datum: Datum, names: Iterable[str]) -> list[Under]:
        targets = datum.inputs.get("target_tokens")
        keys = [_digest(name.encode()) for name in names]
        if targets is not None and targets.dtype == "int64":
            keys.append(_digest(datum.tokens, last_of(targets)))
        return [self._known[key] for key in keys if key in self._known]


def _digest(*parts: bytes) -> bytes:
    digest = blake2b(digest_size=12)
    for part in parts:
        digest.update(part)
    return digest.digest()
