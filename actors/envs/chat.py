"""A trajectory's tokens: messages become ids by the model's own chat template, and what the model sampled is never tokenised again."""

import difflib
import json
from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

from actors.envs.environment import Observation
from actors.messages.generation import Tokens, VersionSpan
from actors.messages.samples import Segment

CACHED = 4096
"""Texts whose tokens are kept: environments repeat themselves, and tokenising is the dearest part of a turn."""

SAMPLED = "@@sampled@@"
"""Stands for the model's turn while a template is rendered."""


TOKEN_BYTES = 4
"""Both an int32 id and a float32 log-probability."""


class ChatRenderer:
    """Reads `tokenizer.json`, the chat template and the stop tokens of a Hugging Face model folder.

    Token ids are int32 little-endian bytes. Raises ValueError, one sentence, for a folder that lacks a part or has a damaged one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        system_prompt: str = "",
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        cached: int = CACHED,
    ) -> None:
        """`variables` and `tools` go to the template; `cached` texts are kept. Raises ValueError too for one of them that it never reads."""
        self._tokenizer, self._special = read_tokenizer(folder)
        given = {**(variables or {}), **({"tools": [*tools]} if tools else {})}
        self._template = _compile(template_of(folder), given, folder)
        self._variables = {"tools": None, **given}
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self.stop_token_ids = self._stop_tokens(folder)
        self._opening = lru_cache(cached)(self._render_opening)
        self._follow_up = lru_cache(cached)(self._render_follow_up)
        self._decoded = lru_cache(cached)(self._decode)

    def opening(self, observation: Observation) -> bytes:
        """Token ids of the first prompt: system prompt, the observation, and the start of the model's turn."""
        return self._opening(observation_key(observation))

    def follow_up(self, observation: Observation, last_token: int) -> bytes:
        """Token ids to append after a sampled turn that ended with `last_token`, up to the start of the next one.

        A turn that was cut off, and so has no stop token, gets one here.
        """
        return self._follow_up(observation_key(observation), last_token if last_token in self.stop_token_ids else -1)

    def next_turn(self, observation: Observation, transcript: "Transcript") -> bytes:
        """Token ids that follow the last sampled turn of `transcript`, up to the start of the next one."""
        return self.follow_up(observation, transcript.last_token)

    def decode(self, ids: bytes) -> str:
        """The text of sampled tokens, without special ones."""
        return self._decoded(ids)

    def _decode(self, ids: bytes) -> str:
        return self._tokenizer.decode(array("i", ids).tolist(), skip_special_tokens=True)

    def _render_opening(self, observation: str) -> bytes:
        return self._encode(self._render([*self._system, *as_messages(observation)])).tobytes()

    def _render_follow_up(self, observation: str, stop_token: int) -> bytes:
        asked = {"role": "user", "content": "?"}
        sampled = {"role": "assistant", "content": SAMPLED}
        text = self._render([*self._system, asked, sampled, *as_messages(observation)])
        _, found, rest = text.rpartition(SAMPLED)
        if not found:
            raise ValueError("the model's chat template leaves out assistant turns, so a second turn can't be made")
        ids = self._encode(rest)
        return ids[_after(stop_token, ids) :].tobytes()

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return self._template.render(**self._special, **self._variables, messages=messages, add_generation_prompt=True)

    def _encode(self, text: str) -> "array[int]":
        return array("i", self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _stop_tokens(self, folder: Path) -> tuple[int, ...]:
        named = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        found = [] if named is None else [named]
        for file in ("generation_config.json", "config.json"):
            ids = _read_json(folder / file).get("eos_token_id")
            found += ids if isinstance(ids, list) else [] if ids is None else [ids]
        return tuple(dict.fromkeys(found))


class Renderer(Protocol):
    """Makes a trajectory's token ids of observations, int32 little-endian bytes."""

    stop_token_ids: tuple[int, ...]

    def opening(self, observation: Observation) -> bytes: ...

    def next_turn(self, observation: Observation, transcript: "Transcript") -> bytes: ...

    def decode(self, ids: bytes) -> str: ...


class Transcript:
    """Appends only. `version_first` is -1 until something was sampled."""

    def __init__(self, opening: bytes) -> None:
        self._tokens = bytearray(opening)
        self._mask = bytearray(len(opening) // TOKEN_BYTES)
        self._logprobs = bytearray(len(opening))
        self._spans: list[VersionSpan] = []
        self._turn_at = len(opening)
        self.version_first = -1

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
    def last_token(self) -> int:
        """The newest token's id."""
        return int.from_bytes(self._tokens[-TOKEN_BYTES:], "little", signed=True)

    def show(self, ids: bytes) -> None:
        """Append tokens the model did not sample."""
        self._tokens += ids
        self._mask += bytes(len(ids) // TOKEN_BYTES)
        self._logprobs += bytes(len(ids))

    def sample(self, tokens: Tokens) -> None:
        """Append a completion. Raises ValueError when it is empty or its arrays and spans don't fit together."""
        num = len(tokens.ids) // TOKEN_BYTES
        if num == 0 or len(tokens.ids) != len(tokens.logprobs) or len(tokens.ids) % TOKEN_BYTES:
            raise ValueError(
                f"a completion with {len(tokens.ids)} bytes of ids and {len(tokens.logprobs)} of log-probs"
            )
        end = 0
        for span in tokens.spans:
            if span.start != end or span.end <= span.start:
                raise ValueError(f"spans of a completion leave a gap at token {end}")
            end = span.end
        if end != num:
            raise ValueError(f"spans of a completion cover {end} of {num} tokens")
        offset = len(self._mask)
        self._spans += [VersionSpan(span.version, offset + span.start, offset + span.end) for span in tokens.spans]
        if self.version_first < 0:
            self.version_first = tokens.spans[0].version
        self._turn_at = len(self._tokens)
        self._tokens += tokens.ids
        self._mask += b"\1" * num
        self._logprobs += tokens.logprobs

    def segment(self) -> Segment:
        """The whole context as one segment."""
        return Segment(bytes(self._tokens), bytes(self._mask), bytes(self._logprobs), tuple(self._spans))


def _after(stop_token: int, ids: "array[int]") -> int:
    """Where to go on in `ids` when the model has sampled the turn's stop token itself; the template may put white space before it."""
    head = ids[:3].tolist()
    return head.index(stop_token) + 1 if stop_token in head else 0


def observation_key(observation: Observation) -> str:
    """Hashable form of an observation: a text as it is, messages as JSON after a NUL."""
    return observation if isinstance(observation, str) else "\0" + json.dumps(observation)


def as_messages(key: str) -> list[dict[str, str]]:
    """The messages of an observation's key: a text is the user's."""
    return json.loads(key[1:]) if key.startswith("\0") else [{"role": "user", "content": key}]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__} instead of an object")
    return cast("dict[str, Any]", found)


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def read_tokenizer(folder: Path) -> tuple[Any, dict[str, str]]:
    """The tokenizer of a model folder, and its special tokens by name. Raises ValueError, one sentence."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"model folder {folder} has no tokenizer.json")
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # it raises nothing narrower
        raise ValueError(f"{path} can't be read as a tokenizer: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    return tokenizer, {
        key: _content(value)
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }


def template_of(folder: Path) -> str:
    """The chat template of a model folder. Raises ValueError, one sentence, where it has none."""
    file = folder / "chat_template.jinja"
    found = (
        file.read_text(encoding="utf-8")
        if file.is_file()
        else _read_json(folder / "tokenizer_config.json").get("chat_template")
    )
    if isinstance(found, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in cast("list[dict[str, str]]", found)}
        found = named.get("default")
    if not found:
        raise ValueError(
            f"model folder {folder} has no chat template (chat_template.jinja or in tokenizer_config.json)"
        )
    return cast("str", found)


def check_template(folder: Path, variables: Collection[str]) -> None:
    """Raises ValueError, one sentence, where a model folder has no chat template that can be used, or one that never reads one of these."""
    _compile(template_of(folder), variables, folder)


def _compile(template: str, variables: Collection[str], folder: Path) -> Any:
    """Templates come with models, from anywhere: they run in jinja's sandbox."""
    from jinja2 import TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    env.globals["raise_exception"] = refuse
    try:
        read = meta.find_undeclared_variables(env.parse(template))
    except TemplateError as error:
        raise ValueError(f"the chat template of {folder} can't be used: {error}") from error
    for name in set(variables) - read:
        near = difflib.get_close_matches(name, read, n=1)
        guess = f"Did you mean {near[0]}?" if near else f"It reads {', '.join(sorted(read))}"
        raise ValueError(f"the chat template of {folder} does not read {name}. {guess}")
    return env.from_string(template)
