"""A trajectory's tokens: messages become ids by the model's own chat template, and what the model sampled is never tokenised again.

Text is text, whatever it spells: the control tokens of a prompt are those that the template writes. Where a text of a message, a tool or a
variable spells one, a character that occurs nowhere else is put into it before the template renders it, and what the template gave is cut
there before it is tokenised.
"""

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from rubato.actors import plugins
from rubato.actors.config import RolloutSection
from rubato.actors.envs.templates import MARKS, PLAIN, Forms, RenderError, compiled, ids_in_configs, read_tokenizer, template_of
from rubato.actors.messages.generation import Tokens, VersionSpan
from rubato.actors.messages.samples import Segment
from rubato.bus.message import well_formed

if TYPE_CHECKING:
    from rubato.actors.envs.environment import Observation

CACHED = 1024
"""Texts whose tokens are kept: rollouts of a group see the same, and tokenising is the dearest part of a turn."""

LONG, LONG_CACHED = 1024, 64
"""From this length on a text is long: of these fewer are kept, since they are as large as they are, and seldom come again."""

TOKEN_BYTES = 4
"""Both an int32 id and a float32 log-probability."""

RARE = (*range(0xA000, 0xA48D), *range(0x12000, 0x1239A), *range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))
"""Characters that stand in a rendering for what is not text, where no text of it has them: syllables of Yi, cuneiform, private use.
Templates print the first of them as they are."""

HEAD = 3
"""Tokens after the model's turn among which its end is looked for: a template may put white space before it."""

UNKNOWN = "\N{REPLACEMENT CHARACTER}"

ROLES = frozenset({"system", "user", "assistant", "tool", "developer", "function"})
"""Every template may name its tokens by them."""

NAMES = frozenset(
    {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "id", "type", "function", "name", "arguments", "text"}
)
"""Keys of most entries of messages, and keys of their types."""

MOST_ROLES = 64
"""Roles of which is remembered that the template shows them."""


class TextTokenizer:
    """A model folder's tokenizer: texts become ids without control tokens, except where a template wrote them, and ids become text."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError, one sentence, for a folder without tokenizer, or a damaged one."""
        self.raw, self.named, add_bos = read_tokenizer(folder)
        self._folder = folder
        added: dict[int, Any] = self.raw.get_added_tokens_decoder()
        self._added: dict[int, str] = {token: entry.content for token, entry in added.items()}
        self._special = {token for token, entry in added.items() if entry.special}
        self._normalized = {token for token, entry in added.items() if entry.normalized and self.raw.normalizer}
        self._singles = {ord(text): UNKNOWN for token, text in self._added.items() if self._is_single(token)}
        eos = self._id_of("eos_token")
        found: list[int] = [] if eos is None else [eos]
        found += [token for token in ids_in_configs(folder, "eos_token_id") if self.raw.id_to_token(token) is not None]
        self.eos: list[int] = [*dict.fromkeys(found)]
        self._padding = {self._id_of("pad_token"), *ids_in_configs(folder, "pad_token_id")} & self._special
        self._first = self._first_tokens(add_bos)
        self._anchor = self._find_anchor()
        self.stop_ids: tuple[int, ...] = tuple(self.eos)
        self._dropped = frozenset(self.stop_ids)
        self.use_marks((), ())

    # -- what is control ------------------------------------------------------------------------------------------------

    def marks_in(self, ids: Iterable[int] = (), source: str = "") -> set[int]:
        """Added tokens that are not special and look like marks, not like words or white space, among `ids` or spelled in `source`."""
        present = {*ids}
        return {
            token
            for token, text in self._added.items()
            if token not in self._special and (token in present or text in source) and _is_mark(text)
        }

    def use_marks(self, written: Iterable[int], around: Iterable[int]) -> None:
        """Take the marks that the template has written.

        They are control in all texts but the model's own turns; those `around` a turn are control there too.
        """
        always = {*around, *self._special, *(token for token in self.eos if _is_mark(self._text_of(token)))}
        self._control = [*map(self._text_of, always | {*written})]
        self._own, self._others = (_spelling(map(self._text_of, always)), _spelling(map(self._text_of, always | {*written})))
        self._safe_names = {name for name in NAMES if not self._others.search(name)}
        unknown = {self._id_of("unk_token"), self.raw.token_to_id(getattr(self.raw.model, "unk_token", None) or "")}
        self._unwanted = (always | {*written}) - unknown if self._normalized & (always | {*written}) else set[int]()

    def is_control(self, token: int) -> bool:
        """Whether it is special, an end of turn or a mark, not a piece of text."""
        return token in self._special or token in self.eos or _is_mark(self._added.get(token, ""))

    def is_part(self, text: str) -> bool:
        """Whether a control token has it within its spelling: a template may write the rest."""
        return any(text in spelled for spelled in self._control)

    def num_special(self, ids: Iterable[int]) -> int:
        """How many of `ids` are special tokens."""
        return sum(token in self._special for token in ids)

    def stop_at(self, stop: Sequence[int | str], end_of_turn: int | None) -> tuple[str, ...]:
        """Take the ids and the tokens of `rollout.stop`, and the template's own end of turn; returns the other texts of `stop`.

        Raises ValueError, one sentence, where neither the folder nor `stop` says what ends a turn.
        """
        ids, by_text = list[int](), {text: token for token, text in self._added.items()}
        for each in stop:
            if isinstance(each, str):
                ids += [by_text[each]] if each in by_text else []
            elif self.raw.id_to_token(each) is None:
                raise ValueError(f"rollout.stop names token {each}, which the tokenizer of {self._folder} has not got")
            else:
                ids.append(each)
        own = [*self.eos, *([] if end_of_turn is None else [end_of_turn])]
        texts = tuple(well_formed(each) for each in stop if isinstance(each, str) and each not in by_text)
        self.stop_ids = tuple(dict.fromkeys([*own, *ids]))
        self._dropped = frozenset(own) | (frozenset(ids) & self._special)
        if not self.eos and not stop:
            hint = "" if end_of_turn is None else f", such as {self._text_of(end_of_turn)}, by which its chat template ends turns"
            raise ValueError(
                f"model folder {self._folder} names no end of turn: no eos_token in tokenizer_config.json or special_tokens_map.json, no "
                f"eos_token_id in generation_config.json or config.json. Set rollout.stop to what ends one{hint}"
            )
        return texts

    def _is_single(self, token: int) -> bool:
        return len(self._added[token]) == 1 and token in self._special

    def _id_of(self, name: str) -> int | None:
        return self.raw.token_to_id(self.named.get(name, ""))

    def _text_of(self, token: int) -> str:
        return self._added.get(token) or self.raw.decode([token], skip_special_tokens=False)

    def _first_tokens(self, add_bos: bool | None) -> list[int]:
        """Tokens that a sequence begins with, by the tokenizer's post-processor or by `add_bos_token`."""
        if add_bos is not None:
            bos = self._id_of("bos_token") if add_bos else None
            return [] if bos is None else [bos]
        bare, whole = self._ids("x"), self.raw.encode("x", add_special_tokens=True).ids
        starts = (at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return whole[: next(starts, 0)]

    # -- text to tokens -------------------------------------------------------------------------------------------------

    def guarded(self, messages: Any, mark: str) -> Any:
        """Messages, or anything else of JSON's types, whose texts spell no control token: `mark` is put into each that does, in a copy.

        One that is spelled across several texts of theirs is found too: a template may print them side by side.
        """
        leaves, names = list[tuple[str, bool]](), set[str]()
        _take_texts(messages, leaves, names)
        leaves = [(text.translate(self._singles), is_own) for text, is_own in leaves] if self._singles else leaves
        whole = "".join([text for text, _ in leaves])
        if names <= self._safe_names and not (self._singles or self._unwanted or self._others.search(whole)):
            return messages
        starts = [*accumulate((len(text) for text, _ in leaves), initial=0)]
        own = [(start, start + len(text)) for start, (text, is_own) in zip(starts, leaves, strict=False) if is_own]
        places = [found.start() for found in self._others.finditer(whole)]
        cuts = [at + 1 for at in places if not _within(at, own) or self._own.match(whole, at)]
        texts = [text for text, _ in leaves]
        if places or self._unwanted:
            texts = [self._normal(_marked(text, at, cuts, mark), mark) for at, text in zip(starts, texts, strict=False)]
        return _rebuilt(messages, iter(texts), lambda text: self._others.sub(rf"\g<0>{mark}", text))

    def encode(self, text: str, mark: str = "") -> "array[int]":
        """Ids of a rendered text, cut at each `mark`."""
        first, *rest = text.split(mark) if mark else [text]
        ids = array("i", self._ids(first))
        for piece in rest:
            ids.extend(self._continued(piece))
        return ids

    def opened(self, ids: "array[int]") -> "array[int]":
        """The ids of a first prompt, with what every sequence begins with where the template does not write it."""
        first = self._first
        if not first or ids[: len(first)].tolist() == first or (first[0] in ids and first[0] not in self.stop_ids):
            return ids
        return array("i", first) + ids

    def decode(self, ids: bytes) -> str:
        """The text of sampled tokens: without padding and the stop token at their end, with every other one as it was sampled."""
        found = [token for token in array("i", ids) if token not in self._padding or token in self.stop_ids]
        while found and found[-1] in self._padding - self._dropped:
            found.pop()
        if found and found[-1] in self._dropped:
            end = found.pop()
            while found and found[-1] == end and end in self._padding:
                found.pop()
        return well_formed(self.raw.decode(found, skip_special_tokens=False))

    def _ids(self, text: str) -> list[int]:
        return self.raw.encode(text, add_special_tokens=False).ids

    def _continued(self, piece: str) -> list[int]:
        """Ids of a piece that does not begin a text: some tokenizers put a space before one that does."""
        before, ids = self._ids(self._anchor) if self._anchor else [], self._ids(self._anchor + piece)
        return ids[len(before) :] if ids[: len(before)] == before else self._ids(piece)

    def _find_anchor(self) -> str:
        """Text to tokenise before such a piece, and to leave out of its ids."""
        marks = [text for token, text in self._added.items() if token in self._special][:1]
        for self._anchor in ("", *marks, *(mark + "\n" for mark in marks), "\n"):
            if self.raw.decode(self._ids("x") + self._continued("x"), skip_special_tokens=False) == "xx":
                return self._anchor
        return ""

    def _normal(self, text: str, mark: str) -> str:
        """`text` cut where the tokenizer finds a control token in it once it has normalised it."""
        done, todo = list[str](), text.split(mark)[::-1] if self._unwanted else []
        while todo:
            piece = todo.pop()
            read = self.raw.encode(piece, add_special_tokens=False)
            places = (at for token, at in zip(read.ids, read.offsets, strict=True) if token in self._unwanted)
            start, end = next(places, (0, 0))
            if end - start > 1:
                todo += [piece[start + 1 :], piece[: start + 1]]
            else:
                done.append(piece[:start] + UNKNOWN + piece[end:] if end > start else piece)
        return mark.join(done) if self._unwanted else text


class ChatRenderer:
    """Reads `tokenizer.json`, the chat template and the ends of turn of a Hugging Face model folder.

    Token ids are int32 little-endian bytes. Raises ValueError, one sentence, for a folder that lacks a part or has a damaged one, and for
    a template that can't render a first prompt, or leaves out what is said in it. Messages that can't be rendered raise RenderError.
    """

    def __init__(
        self,
        folder: Path,
        *,
        system_prompt: str = "",
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[int | str] = (),
        turns: int = 2,
        cached: int = CACHED,
    ) -> None:
        """`variables` and `tools` go to the template; `stop` is `rollout.stop`; with `turns` above 1 a second one is tried too; `cached`
        texts are kept. Raises ValueError too for one of the variables that the template never reads.
        """
        self._tokenizer = TextTokenizer(folder)
        given = {**(variables or {}), **({"tools": [*tools]} if tools else {})}
        self._source = template_of(folder)
        self._template = compiled(self._source, folder, given)
        self._given = as_plain({"tools": None, **given})
        self._system = as_plain([{"role": "system", "content": system_prompt}] if system_prompt else [])
        self._guarded_given = lru_cache(4)(partial(self._tokenizer.guarded, self._given))
        texts = [self._given, self._system, self._tokenizer.named]
        self._fixed = self._source + well_formed(json.dumps(texts, ensure_ascii=False))
        self._rare = unused(self._fixed, 3)
        self._folder = folder
        self._forms = PLAIN
        self._shown = {"system", "user", "assistant"}
        self.drops_reasoning = False
        """The template leaves out what the model reasoned in earlier turns."""
        end = self._try_out(turns)
        self._guarded_given.cache_clear()  # the marks are known by now
        self.stop_strings = self._tokenizer.stop_at(stop, end)
        self.stop_token_ids = self._tokenizer.stop_ids
        self._opening = remembering(self._render_opening, cached)
        self._follow_up = remembering(self._render_follow_up, cached)
        self._decoded = remembering(self._tokenizer.decode, cached)

    def opening(self, observation: "Observation") -> bytes:
        """Token ids of the first prompt: system prompt, the observation, and the start of the model's turn."""
        return self._opening(observation_key(observation))

    def follow_up(self, observation: "Observation", last_token: int) -> bytes:
        """Token ids to append after a sampled turn that ended with `last_token`, up to the start of the next one.

        A turn that was cut off, and so has no stop token, gets one here.
        """
        return self._follow_up(observation_key(observation), last_token if last_token in self.stop_token_ids else -1)

    def next_turn(self, observation: "Observation", transcript: "Transcript") -> bytes:
        """Token ids that follow the last sampled turn of `transcript`, up to the start of the next one."""
        return self.follow_up(observation, transcript.last_token)

    def decode(self, ids: bytes) -> str:
        """The text of sampled tokens, without padding and the stop token at their end."""
        return self._decoded(ids)

    def chat(self, messages: "Observation") -> bytes:
        """Token ids of a conversation as it is, without the system prompt, and of the start of the model's turn."""
        return self._render_opening(observation_key(messages), bare=True)

    def _render_opening(self, key: "Key", *, bare: bool = False) -> bytes:
        new = as_messages(key, self._forms)
        mark, shown, _ = self._marks(key[1], new)
        messages = [*([] if bare else self._system), *new]
        ids = self._tokenizer.encode(self._render(messages, mark), mark)
        self._require_shown(messages, mark, shown)
        return self._tokenizer.opened(ids).tobytes()

    def _render_follow_up(self, key: "Key", stop_token: int) -> bytes:
        new = as_messages(key, self._forms)
        mark, shown, said = self._marks(key[1], new)
        asked, sampled = {"role": "user", "content": "?"}, {"role": "assistant", "content": said}
        messages = [*self._system, asked, sampled, *new]
        text = self._render(messages, mark + said)
        self._require_shown(messages, mark, shown)
        _, found, rest = text.rpartition(said)
        if not found:
            raise RenderError(f"the chat template of {self._folder} leaves out assistant turns, so a second turn can't be made")
        ids = self._tokenizer.encode(rest, mark)
        return ids[_after(stop_token, ids) :].tobytes()

    def _render(self, messages: Sequence[Mapping[str, Any]], marks: str) -> str:
        """The text of a conversation; `marks`: first the one that is put into texts. Raises RenderError."""
        given = {**self._tokenizer.named, **self._guarded_given(marks[0]), MARKS: marks, "add_generation_prompt": True}
        told = [{**each, "role": self._role(each.get("role"), marks[0])} for each in formed(messages, self._forms)]
        try:
            return self._template.render({**given, "messages": self._tokenizer.guarded(told, marks[0])})
        except Exception as error:  # a template's expressions raise whatever Python's do
            said = f"{error}" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: {error}"
            roles = ", ".join(str(message.get("role")) for message in messages[:8])
            first = " ".join(said.split())[:500]
            raise RenderError(f"the chat template of {self._folder} can't render messages of {roles}: {first}") from error

    def _role(self, role: Any, mark: str) -> Any:
        """A role that the template does not know may stand within a control token of whose rest is the template's."""
        if not isinstance(role, str) or role in ROLES or role in self._source or not self._tokenizer.is_part(role):
            return role
        return role[:1] + mark + role[1:]

    def _require_shown(self, messages: Sequence[Mapping[str, Any]], mark: str, said: str) -> None:
        """Raises RenderError for a role whose messages the template leaves out without a word."""
        for role in {str(message.get("role")) for message in messages} - self._shown:
            others = [{**each, "content": said} if each.get("role") == role else each for each in messages]
            try:
                is_shown = said in self._render(others, mark + said)
            except RenderError:
                is_shown = True  # it is no text there
            if not is_shown:
                raise RenderError(f"the chat template of {self._folder} leaves out messages of the role {role[:80]}")
            if len(self._shown) < MOST_ROLES:
                self._shown.add(role)

    def _marks(self, text: str, messages: Sequence[Any]) -> Sequence[str]:
        """Characters that no text has: to put into texts, to stand for a message, and for the model's turn. `text` is what `messages` were."""
        if text.isascii() and "\\u" not in text:  # nor may a call's arguments hold what is not ASCII
            return self._rare
        return unused(json.dumps(messages, ensure_ascii=False) + self._fixed, 3)

    # -- at the launch --------------------------------------------------------------------------------------------------

    def _try_out(self, turns: int) -> int | None:
        """Render a first prompt and a second turn, and learn the template's marks; returns its end of turn, if it has one."""
        tokenizer, source = self._tokenizer, self._source
        mark, said, asked, told = unused(self._fixed, 4)
        user, system = {"role": "user", "content": asked}, [{"role": "system", "content": told}] if self._system else []
        self._forms = Forms(parts=not self._shows([*system, user], asked) and self._shows([*system, user], asked, Forms(parts=True)))
        self._forms = self._forms_of_calls(asked, told, said)
        try:
            first = self._render([*system, user], mark)
            self._render([*self._system, user], mark)
        except RenderError as error:
            raise ValueError(f"{error}{self._advice(user, told, mark)}") from error
        for text, what in ((asked, "the user's message"), *([(told, "rollout.system_prompt")] if system else [])):
            if text not in first:
                raise ValueError(f"the chat template of {self._folder} leaves out {what}")
        try:
            both = self._render([*system, user, {"role": "assistant", "content": said}, {**user, "content": told}], mark)
            before, found, rest = both.rpartition(said)
            if not found or told not in rest:
                raise RenderError(f"the chat template of {self._folder} leaves out the model's turn, or what follows it")
        except RenderError as error:
            if turns > 1:
                raise ValueError(f"{error}. Where one turn is all, set rollout.max_turns=1") from error
            tokenizer.use_marks(tokenizer.marks_in(tokenizer.encode(first), source), ())
            return None
        between = tokenizer.encode(rest.partition(told)[0])
        everything = [*tokenizer.encode(first), *tokenizer.encode(before), *between]
        tokenizer.use_marks(tokenizer.marks_in(everything, source), tokenizer.marks_in(between))
        self.drops_reasoning = turns > 1 and self._leaves_reasoning_out([*system, user], {**user, "content": told}, said)
        # Where the template begins a turn with more than a prompt ends with, a turn has parts, each with an end of its own.
        parts = tokenizer.num_special(tokenizer.encode(before)) - tokenizer.num_special(tokenizer.encode(first))
        head = between[:HEAD].tolist()
        end = next((token for token in head if tokenizer.is_control(token)), None)
        if end is None or parts > 0 or tokenizer.raw.decode(head[: head.index(end)]).strip():
            return None
        return end

    def _shows(self, messages: Sequence[Mapping[str, Any]], text: str, forms: Forms = PLAIN) -> bool:
        """Whether the template renders `messages` in these forms, with `text` in it, and Python's own words for nothing in none."""
        before, self._forms = self._forms, forms
        try:
            shown = self._render(messages, unused(self._fixed + json.dumps(messages, ensure_ascii=False), 1)[0])
        except RenderError:
            return False
        finally:
            self._forms = before
        return text in shown and f"'{text}'" not in shown and ("None" not in shown or "None" in self._fixed)

    def _forms_of_calls(self, name: str, value: str, said: str) -> Forms:
        """The forms in which the template shows a turn that calls a tool; those of most templates where it shows none."""
        function = {"name": "f", "arguments": {name: value}}
        call = {"id": "123456789", "type": "function", "function": function}
        turn = [{"role": "user", "content": said}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        tried = [
            self._forms._replace(text_arguments=text_arguments, no_null=no_null)
            for text_arguments in (False, True)
            for no_null in (False, True)
        ]
        shown = (forms for text in (name, said) for forms in tried if self._shows(turn, text, forms))
        return next(shown, self._forms)

    def _advice(self, user: Mapping[str, Any], told: str, mark: str) -> str:
        try:
            self._render([*([] if self._system else [{"role": "system", "content": told}]), user], mark)
        except RenderError:
            return ""
        return ". Leave rollout.system_prompt empty" if self._system else ". Set rollout.system_prompt"

    def _leaves_reasoning_out(self, asked: list[Any], then: Mapping[str, Any], thought: str) -> bool:
        forms: list[dict[str, str]] = [{"content": f"<think>\n{thought}\n</think>\n\nx"}]
        if "reasoning_content" in self._source:
            forms.append({"content": "x", "reasoning_content": thought})
        (mark,) = unused(self._fixed + thought, 1)
        try:
            return any(
                thought not in self._render([*asked, {"role": "assistant", **form}, then], mark)
                for form in forms
                if thought in self._render([*asked, {"role": "assistant", **form}], mark) or form is forms[0]
            )
        except RenderError:
            return False


class Renderer(Protocol):
    """Makes a trajectory's token ids of observations, int32 little-endian bytes."""

    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    """Texts of several tokens that end a turn as well."""
    drops_reasoning: bool
    """Its template leaves out what the model reasoned in earlier turns."""

    def opening(self, observation: "Observation") -> bytes: ...

    def chat(self, messages: "Observation") -> bytes: ...

    def next_turn(self, observation: "Observation", transcript: "Transcript") -> bytes: ...

    def decode(self, ids: bytes) -> str: ...


def renderer_of(limits: RolloutSection, folder: Path, *, tools: Sequence[Mapping[str, Any]] = (), cached: int = CACHED) -> Renderer:
    """Renderer of tasks with these `limits`; `tools` where the config names none. Raises ValueError, one sentence, where that can't be."""
    build = partial(plugins.load(plugins.NAMED_RENDERER), limits.renderer) if limits.renderer else ChatRenderer
    return build(
        folder,
        system_prompt=limits.system_prompt,
        variables=limits.chat_template_kwargs,
        tools=limits.tools or tools,
        stop=limits.stop,
        turns=limits.max_turns,
        cached=cached,
    )


class Transcript:
    """Appends, and takes back only what nothing was sampled behind. The oldest and newest version that sampled are -1 until one has."""

    def __init__(self, opening: bytes) -> None:
        self._tokens = bytearray(opening)
        self._mask = bytearray(len(opening) // TOKEN_BYTES)
        self._logprobs = bytearray(len(opening))
        self._spans: list[VersionSpan] = []
        self._turn_at = len(opening)
        self.version_first = self.version_last = -1

    def __len__(self) -> int:
        return len(self._mask)

    @property
    def prompt(self) -> bytes:
        """int32 ids of everything so far."""
        return bytes(self._tokens)

    @property
    def last_turn(self) -> tuple[bytes, bytes]:
        """int32 ids before the newest sampled turn, and from there on."""
        return bytes(self._tokens[: self._turn_at]), bytes(self._tokens[self._turn_at :])

    @property
    def turn_at(self) -> int:
        """Tokens before the newest sampled turn."""
        return self._turn_at // TOKEN_BYTES

    @property
    def last_token(self) -> int:
        """The newest token's id."""
        return self.token(len(self) - 1)

    def token(self, at: int) -> int:
        """The id of one token."""
        return int.from_bytes(self._tokens[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES], "little", signed=True)

    def show(self, ids: bytes) -> None:
        """Append tokens the model did not sample."""
        self._tokens += ids
        self._mask += bytes(len(ids) // TOKEN_BYTES)
        self._logprobs += bytes(len(ids))

    def cut(self, num: int) -> None:
        """Take back what was shown behind the first `num` tokens, the newest sampled turn being among those."""
        del self._tokens[num * TOKEN_BYTES :], self._mask[num:], self._logprobs[num * TOKEN_BYTES :]

    def sample(self, tokens: Tokens) -> None:
        """Append a completion. Raises ValueError when it is empty or its arrays and spans don't fit together."""
        num = len(tokens.ids) // TOKEN_BYTES
        if num == 0 or len(tokens.ids) != len(tokens.logprobs) or len(tokens.ids) % TOKEN_BYTES:
            raise ValueError(f"a completion with {len(tokens.ids)} bytes of ids and {len(tokens.logprobs)} of log-probs")
        end = 0
        for span in tokens.spans:
            if span.start != end or span.end <= span.start:
                raise ValueError(f"spans of a completion leave a gap at token {end}")
            end = span.end
        if end != num:
            raise ValueError(f"spans of a completion cover {end} of {num} tokens")
        offset = len(self._mask)
        self._spans += [VersionSpan(span.version, offset + span.start, offset + span.end) for span in tokens.spans]
        versions = [span.version for span in tokens.spans]
        self.version_first = min(versions) if self.version_first < 0 else min(self.version_first, *versions)
        self.version_last = max(self.version_last, *versions)
        self._turn_at = len(self._tokens)
        self._tokens += tokens.ids
        self._mask += b"\1" * num
        self._logprobs += tokens.logprobs

    def segment(self) -> Segment:
        """The whole context as one segment."""
        return Segment(bytes(self._tokens), bytes(self._mask), bytes(self._logprobs), tuple(self._spans))


_to_json = json.JSONEncoder(ensure_ascii=False).encode

Key = tuple[bool, str]
"""Hashable form of an observation: whether it is messages, and its text, or that of their JSON."""


def observation_key(observation: "Observation") -> Key:
    """See Key. What is no Unicode, as a surrogate that stands alone, becomes U+FFFD. Raises RenderError for what JSON can't hold."""
    if isinstance(observation, str):
        return False, well_formed(observation)
    try:
        return True, well_formed(_to_json(observation))
    except (TypeError, ValueError, RecursionError) as error:
        raise RenderError(f"chat messages that can't be rendered: {error}") from error


def remembering(work: Callable[..., Any], cached: int) -> Callable[..., Any]:
    """`work`, whose first argument is an observation's key, or ids. Its newest results are kept: `cached` of them, of long ones fewer."""
    kept = [lru_cache(most)(work) for most in (cached, min(cached, LONG_CACHED))]
    return lambda first, *rest: kept[len(first[1] if isinstance(first, tuple) else first) >= LONG](first, *rest)


def as_messages(key: Key, forms: Forms = PLAIN) -> list[Any]:
    """The messages of an observation's key, in these forms: a text is the user's."""
    return formed(json.loads(key[1]) if key[0] else [{"role": "user", "content": key[1]}], forms)


def formed(messages: Sequence[Any], forms: Forms) -> list[Any]:
    """`messages` in these forms; done again it changes nothing."""
    return [_formed(message, forms) if isinstance(message, dict) else message for message in messages]


def _formed(message: Mapping[str, Any], forms: Forms) -> dict[str, Any]:
    made, calls, content = {**message}, message.get("tool_calls"), message.get("content")
    content = "" if content is None and forms.no_null else content
    made["content"] = [{"type": "text", "text": content}] if forms.parts and isinstance(content, str) else content
    if isinstance(calls, list):
        made["tool_calls"] = [_formed_call(call, forms) for call in cast("list[Any]", calls)]
    if not calls:
        made.pop("tool_calls", None)
    return made


def _formed_call(call: Any, forms: Forms) -> Any:
    if not isinstance(call, dict):
        return call
    told = cast("dict[str, Any]", call)
    if isinstance(told.get("function"), dict):
        return {**told, "function": _formed_call(told["function"], forms)}
    arguments = told.get("arguments") or {}
    if isinstance(arguments, str) and not forms.text_arguments:
        arguments = _parsed(arguments)
    elif forms.text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**told, "arguments": arguments}


def _parsed(arguments: str) -> Any:
    """As an object, if they are one: models write what is none too."""
    try:
        found = well_formed(json.loads(arguments))
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def unused(text: str, num: int) -> list[str]:
    """`num` characters that `text` does not have. Raises RenderError for a text that has all that are tried."""
    found = [*islice((chr(code) for code in RARE if chr(code) not in text), num)]
    if len(found) < num:
        raise RenderError(f"a text that holds {len(RARE):,} rare characters can't be rendered")
    return found


def as_plain(value: Any) -> Any:
    """As JSON has it, in Unicode."""
    return json.loads(well_formed(json.dumps(value, ensure_ascii=False)))


def _is_mark(text: str) -> bool:
    """Some tokenizers add words and runs of white space, which are text."""
    return len(text) > 1 and not text.isalnum() and bool(text.strip(" \n\t\r▁"))


def _spelling(texts: Iterable[str]) -> "re.Pattern[str]":
    """Finds the first character of each place where one of `texts` stands."""
    firsts: dict[str, set[str]] = {}
    for text in filter(None, texts):
        firsts.setdefault(text[0], set()).add(text[1:])
    one = "|".join(f"{re.escape(first)}(?={_tree(rest)})" for first, rest in sorted(firsts.items()))
    return re.compile(one or r"(?!)")


def _tree(texts: set[str]) -> str:
    """A pattern of all `texts` that looks at each character once, however many they are."""
    if "" in texts:
        return ""
    firsts: dict[str, set[str]] = {}
    for text in texts:
        firsts.setdefault(text[0], set()).add(text[1:])
    if len(firsts) == 1:
        ((first, rest),) = firsts.items()
        return re.escape(first) + _tree(rest)
    return "(?:" + "|".join(re.escape(first) + _tree(rest) for first, rest in sorted(firsts.items())) + ")"


def _take_texts(value: Any, leaves: list[tuple[str, bool]], names: set[str], *, own: bool = False) -> None:
    """Add texts in their order, and whether each is of the model's turns; and names of dicts' entries, and of the types of parts."""
    if isinstance(value, str):
        leaves.append((value, own))
    elif isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        own = own or entries.get("role") == "assistant"
        names.update(entries)
        for key, entry in entries.items():
            if key != "type" or not isinstance(entry, str):
                _take_texts(entry, leaves, names, own=own)
            else:
                names.add(entry)
    elif isinstance(value, list):
        for entry in cast("list[Any]", value):
            _take_texts(entry, leaves, names, own=own)


def _rebuilt(value: Any, texts: Iterator[str], name: Callable[[str], str]) -> Any:
    """`value` with its leaves replaced by `texts`, and all other texts as `name` gives them."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value).items()
        return {
            name(key): name(entry) if key == "type" and isinstance(entry, str) else _rebuilt(entry, texts, name) for key, entry in entries
        }
    return [_rebuilt(entry, texts, name) for entry in cast("list[Any]", value)] if isinstance(value, list) else value


def _marked(text: str, start: int, cuts: Sequence[int], mark: str) -> str:
    """`text`, which begins at `start`, with `mark` at those of `cuts` that are in it or at its end."""
    at = [cut - start for cut in cuts if start < cut <= start + len(text)]
    return mark.join(text[one:other] for one, other in zip([0, *at], [*at, len(text)], strict=True))


def _within(at: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(start <= at < end for start, end in spans)


def _after(stop_token: int, ids: "array[int]") -> int:
    """Where to go on in `ids` when the model has sampled the turn's stop token itself; the template may put white space before it."""
    head = ids[:HEAD].tolist()
    return head.index(stop_token) + 1 if stop_token in head else 0
