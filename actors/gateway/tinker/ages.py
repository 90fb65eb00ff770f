"""How old what was sampled is, by digests of sampled sequences."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from threading import Lock
from typing import NamedTuple

import msgspec

from rubato.actors.gateway.tinker.journal import Book
from rubato.actors.gateway.tinker.wire import last_of
from rubato.actors.messages.tinker import Datum, ForwardBackward

BY_SAMPLES = frozenset({"importance_sampling", "ppo", "cispo", "dro", "gspo"})
"""Losses of policy gradients."""


class Under(NamedTuple):
    """The weights that a sequence was sampled under; an empty `model` is the base model."""

    model: str
    oldest: int
    newest: int


class Noted(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that was sampled, in the book: by the digests of its tokens and of its name."""

    tokens: bytes
    name: bytes
    under: Under


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

    @classmethod
    def of_metrics(cls, num: int, told: Mapping[str, float]) -> "Judged":
        """What `metrics` gave of a request of `num` sequences, read back."""
        if (unknown := told.get("rubato/unknown_frac:mean")) is None:
            return cls()
        oldest, newest = told.get("rubato/version_min:min"), told.get("rubato/version_max:max")
        num_unknown = round(unknown * num)
        return cls("", num - num_unknown, num_unknown, None if oldest is None else int(oldest), None if newest is None else int(newest))

    def metrics(self, *, reduced: bool) -> dict[str, float]:
        """With the SDK's word for how parts of a batch are put together, or without it."""
        if not self.num_known + self.num_unknown:
            return {}
        told = {"unknown_frac": ("mean", self.num_unknown / (self.num_known + self.num_unknown))}
        if self.oldest is not None and self.newest is not None:
            told |= {"version_min": ("min", self.oldest), "version_max": ("max", self.newest)}
        return {f"rubato/{name}" + (f":{how}" if reduced else ""): float(value) for name, (how, value) in told.items()}


class Ages:
    """Remembers as many as it may, the newest ones, also when the server is started again."""

    def __init__(self, most: int, book: Book) -> None:
        self._most, self._book = most, book
        self._known: dict[bytes, Under] = {}
        self._unwritten: list[Noted] = []
        self._num_written = 0
        self._turn = Lock()

    def load(self) -> None:
        """What a server of before noted. Blocks."""
        noted: list[Noted] = self._book.read()[-self._most :] if self._most else []
        for each in noted:
            self._know(each)
        self._book.rewrite(noted)
        self._num_written = len(noted)

    def note(self, prompt: bytes, sampled: bytes, name: str, under: Under) -> None:
        """A sequence was sampled, which clients know by `name`; `keep` puts it into the book."""
        if self._most:
            noted = Noted(_digest(prompt, sampled), _digest(name.encode()), under)
            self._know(noted)
            self._unwritten.append(noted)

    def keep(self) -> None:
        """What was noted before is in the book for good once this returns. Blocks, and may be called from several threads."""
        with self._turn:
            batch = list(self._unwritten)
            if not batch:
                return
            if self._num_written + len(batch) > 2 * self._most:
                kept = [*self._book.read(), *batch][-self._most :]
                self._book.rewrite(kept)
                self._num_written = len(kept)
            else:
                self._book.add(*batch)
                self._num_written += len(batch)
            del self._unwritten[: len(batch)]

    def _know(self, noted: Noted) -> None:
        for key in (noted.tokens, noted.name):
            self._known.pop(key, None)
            self._known[key] = noted.under
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
