"""What was said in a session, as a forest: a request goes on from the turn that its history leads to, with the tokens that were kept of it.

Clients send the whole conversation again with every request, and not as they got it: arguments of calls are serialised anew, parts of
texts are joined, what is null is left out, and so is what the model reasoned. So messages are compared by what they mean, and a history is
never tokenised twice: behind the deepest turn that it leads to come the tokens that were sampled there. A history that leads to none,
because it was edited, shortened or is another agent's, begins a tree of its own. Where a request brings token ids, they are compared as
they are.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple, cast

from rubato.actors.envs.chat import TOKEN_BYTES, Transcript

Message = Mapping[str, Any]

Meaning = str
"""Role and text of a message, or canonical JSON of one that has more: two that say the same have the same."""

MOST_MESSAGES = 10_000
"""Of one request."""


def meaning_of(message: Message, *, reasoning: bool = True) -> Meaning:
    """Role, text, reasoning (unless it is not to count) and calls of a message. Ids of calls don't count: a result is known by where it
    stands.
    """
    role = "system" if message.get("role") == "developer" else message.get("role")
    text, calls = _text_of(message.get("content")), message.get("tool_calls")
    thought = message.get("reasoning_content") if reasoning else None
    if not thought and not calls:  # most of them, in each of many requests; no JSON begins so
        return f"{role} {text}"
    told: dict[str, Any] = {"role": role}
    if text:
        told["content"] = text
    if thought:
        told["reasoning"] = thought
    if calls:
        told["calls"] = [_call_of(call) for call in cast("list[Any]", calls)]
    return json.dumps(told, ensure_ascii=False, sort_keys=True)


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in cast("list[Any]", content) if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


def _call_of(call: Any) -> Any:
    function = cast("dict[str, Any]", call).get("function") if isinstance(call, dict) else None
    told = cast("dict[str, Any]", function if isinstance(function, dict) else call)
    if not isinstance(told, dict):
        return told
    arguments = told.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # a model may write what is no JSON, or is nested too deep
            arguments = _numbers(json.loads(arguments))
        return [told.get("name"), arguments]
    return [told.get("name"), _numbers(arguments)]


def _numbers(value: Any) -> Any:
    """With 2.0 as 2, which is how JavaScript writes it."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_numbers(item) for item in cast("list[Any]", value)]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


class Written(Sequence[Message]):
    """Messages as their client wrote them, each of which `read` decodes and checks where it is wanted: those that the session has seen are not.

    What `read` raises for one that is none comes from where it is wanted first, which for a new one is its place in the forest.
    """

    def __init__(self, parts: Sequence[bytes], read: Callable[[bytes], Message]) -> None:
        self.parts, self._read = parts, read
        self._told: dict[int, Message] = {}

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        told = self._told.get(at)
        if told is None:
            told = self._told[at] = self._read(self.parts[at])
        return told


@dataclass(eq=False, slots=True)
class Turn:
    """One sampled turn."""

    transcript: Transcript
    begin: int
    """Tokens of the transcript up to where the turn begins."""
    end: int
    """And to where it ends."""
    before: "Turn | None"
    """The turn that its history led to."""
    choice: int = 0
    """One of several answers to the request of this number; 0: the only one."""
    text: str = ""
    finish_reason: str = ""
    asked: int = 0
    """The number of its request, in the order in which they came."""

    def path(self) -> Iterator["Turn"]:
        """It and those before it, newest first."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.before


class Ended(Transcript):
    """A transcript as it was when `turn` had ended, to be read, for what is shown behind that."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    @property
    def prompt(self) -> bytes:
        return self._turn.transcript.prompt[: self._turn.end * TOKEN_BYTES]

    @property
    def last_turn(self) -> tuple[bytes, bytes]:
        prompt, at = self.prompt, self._turn.begin * TOKEN_BYTES
        return prompt[:at], prompt[at:]

    @property
    def last_token(self) -> int:
        return self._turn.transcript.token(self._turn.end - 1)


@dataclass(eq=False, slots=True)
class _Node:
    """Messages up to one; `turn` is the newest that was sampled as it."""

    turn: Turn | None = None
    next: dict[Meaning, "_Node"] = field(default_factory=dict)
    bare: dict[Meaning, "_Node"] = field(default_factory=dict)
    """Those that a history without its reasoning leads to, where none of `next` says that."""


class Place(NamedTuple):
    """Where a request goes on."""

    before: Turn | None
    """The deepest turn that its history leads to."""
    new: Sequence[Message]
    """The messages behind that, or all."""
    meanings: tuple[Meaning, ...] = ()
    """Of the whole history; none where it came as tokens."""
    root: str = ""
    known: tuple[_Node | None, int] = (None, 0)
    """The node of as much of it as the forest has, and how many messages that is."""
    anew: bool = False
    """Whether the tokens of its history are not those that were kept, but all new."""

    @property
    def num_kept(self) -> int:
        """Tokens up to where the new ones begin."""
        return 0 if self.before is None or self.anew else self.before.end


class Forest:
    """Transcripts of one session and the turns in them, in the order in which they were sampled."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._roots: dict[str, _Node] = {}
        self._meanings: dict[bytes, Meaning] = {}
        """Of the newest request's messages, as they were written: the next one mostly brings them again."""
        self._ended: dict[tuple[int, bytes], Turn] = {}
        """By the number and the digest of all tokens up to a turn's end; those of the first `_num_ended` turns."""
        self._num_ended = 0

    def place(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Place:
        """Where a request with this history, and these tools before it, goes on."""
        root = json.dumps(tools, ensure_ascii=False, sort_keys=True) if tools else ""
        meanings = self._meanings_of(messages) if isinstance(messages, Written) else tuple(map(meaning_of, messages))
        node, before, num = self._roots.get(root), None, 0
        known = node, 0
        for depth, meaning in enumerate(meanings, 1):
            node = (node.next.get(meaning) or node.bare.get(meaning)) if node is not None else None
            if node is None:
                break
            known = node, depth
            if node.turn is not None:
                before, num = node.turn, depth
        return Place(before, messages[num:], meanings, root, known)

    def _meanings_of(self, messages: Written) -> tuple[Meaning, ...]:
        before = self._meanings
        found = [before.get(part) or meaning_of(messages[at]) for at, part in enumerate(messages.parts)]
        self._meanings = dict(zip(messages.parts, found, strict=True))
        return tuple(found)

    def place_tokens(self, prompt: bytes) -> Place:
        """Where a request with this prompt of int32 ids goes on: behind the deepest turn up to which it has the tokens that were kept."""
        for turn in self.turns[self._num_ended :]:
            self._ended[turn.end, blake2b(Ended(turn).prompt, digest_size=16).digest()] = turn
        self._num_ended = len(self.turns)
        before, digest, at = None, blake2b(digest_size=16), 0
        for end in sorted({end for end, _ in self._ended if end * TOKEN_BYTES <= len(prompt)}):
            digest.update(prompt[at : end * TOKEN_BYTES])
            at = end * TOKEN_BYTES
            before = self._ended.get((end, digest.digest()), before)
        return Place(before, ())

    def opened(self, place: Place, shown: bytes, *, alone: bool = False) -> Transcript:
        """The transcript in which the request's turn is to be sampled: that of the turn before it, if nothing follows that yet, else a new one
        that begins with the tokens up to there. `shown` are the token ids of the request's new messages; `alone`: a new one in any case.
        """
        before = place.before
        if before is None or place.anew:
            return Transcript(shown)
        if len(before.transcript) == before.end and not alone:
            before.transcript.show(shown)
            return before.transcript
        return Transcript(before.transcript.prompt[: before.end * TOKEN_BYTES] + shown)

    def withdrawn(self, place: Place, transcript: Transcript) -> None:
        """No turn was sampled at the end of `transcript`, which the request had gone on in: another may."""
        if place.before is not None:
            transcript.cut(place.before.end)

    def sampled(
        self,
        place: Place,
        transcript: Transcript,
        said: Message,
        *,
        choice: int = 0,
        forced: int = 0,
        text: str = "",
        finish_reason: str = "",
        asked: int = 0,
    ) -> Turn:
        """A turn was sampled at the end of `transcript`, which the client is told as the message `said`; it began with `forced` tokens that
        were not sampled. `text` is the whole of it.
        """
        turn = Turn(transcript, transcript.turn_at - forced, len(transcript), place.before, choice, text, finish_reason, asked)
        if place.meanings:
            self._tell(place, said, turn)
        self.turns.append(turn)
        return turn

    def _tell(self, place: Place, said: Message, turn: Turn) -> None:
        """The node of `said` behind the place's history is `turn`. A history without its reasoning leads there too."""
        node, num = place.known
        node = before = self._roots.setdefault(place.root, _Node()) if node is None else node
        for meaning in (*place.meanings[num:], meaning_of(said)):
            found = node.next.get(meaning)
            if found is None:
                found = node.next[meaning] = _Node()
            before, node = node, found
        node.turn = turn
        if said.get("reasoning_content"):
            before.bare[meaning_of(said, reasoning=False)] = node

    @property
    def last(self) -> Turn:
        """The turn of the request that came last; turns of requests that were under way at once end in any order."""
        return max(self.turns, key=lambda turn: turn.asked)

    def carrying(self, last: Turn) -> list[Transcript]:
        """The transcripts that led to the turn `last`, and to the other answers to its request: those that have a turn of their path, and
        those that go on from one. An answer that the agent chose another in place of led nowhere, nor did what goes on from it.
        """
        ends = [turn for turn in self.turns if turn.choice == last.choice] if last.choice else [last]
        on_path = {turn for end in ends for turn in end.path()}
        return list(dict.fromkeys(turn.transcript for turn in self.turns if _leads(turn, on_path)))


def _leads(turn: Turn, on_path: Set[Turn]) -> bool:
    for each in turn.path():
        if each in on_path:
            return True
        if each.choice:
            return False
    return False
