"""Messages become tokens by a renderer of the package `renderers`: code for one family of models, where a chat template would be guessed at."""

import difflib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, get_args

from rubato.actors.envs.chat import CACHED, Key, TextTokenizer, Transcript, as_messages, as_plain, observation_key, remembering, unused
from rubato.actors.envs.environment import Observation
from rubato.actors.envs.templates import Forms, RenderError
from rubato.bus.message import well_formed

NOT_ONE_MODEL = frozenset({"auto", "custom", "default"})
"""Names of the package that stand for no family of models."""


class ParsedTurn(NamedTuple):
    """What a turn says."""

    content: str
    reasoning: str
    calls: list[tuple[Any, Any, str]]
    """Name, arguments and text of each; what is no call has no name."""


class NamedRenderer:
    """Renders as ChatRenderer does, by the package's renderer `name`. Raises ValueError, one sentence, where that can't be."""

    drops_reasoning = False

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        system_prompt: str = "",
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[int | str] = (),
        turns: int = 2,
        cached: int = CACHED,
    ) -> None:
        """As ChatRenderer; the package's code decides what a second turn looks like, so `turns` changes nothing."""
        from renderers import create_renderer

        config = renderer_config(name, variables or {})
        self._tokenizer = TextTokenizer(folder)
        self._asked = _Tokenizer(folder, self._tokenizer)
        try:
            self._renderer: Any = create_renderer(self._asked, config)
        except Exception as error:  # it checks by assertions too
            raise ValueError(f"rollout.renderer {name} does not fit model folder {folder}: {error}") from error
        self._system = as_plain([{"role": "system", "content": system_prompt}] if system_prompt else [])
        self._tools = as_plain([*tools]) or None
        self._fixed = json.dumps([self._system, self._tools], ensure_ascii=False)
        self._name = name
        self._rendering = Lock()
        self._tokenizer.eos = [*self._renderer.get_stop_token_ids()]
        self.stop_strings = self._tokenizer.stop_at(stop, None)
        self.stop_token_ids = self._tokenizer.stop_ids
        self._learn_marks()
        self._opening = remembering(self._render_opening, cached)

    def opening(self, observation: Observation) -> bytes:
        """As ChatRenderer.opening."""
        return self._opening(observation_key(observation))

    def chat(self, messages: Observation) -> bytes:
        """As ChatRenderer.chat."""
        return self._render_opening(observation_key(messages), bare=True)

    def next_turn(self, observation: Observation, transcript: Transcript) -> bytes:
        """As ChatRenderer.next_turn; reasoning that the turn was cut in is closed too, as the model's family has it."""
        key = observation_key(observation)
        before, sampled = (array("i", part).tolist() for part in transcript.last_turn)
        found = self._bridge(before, sampled, key)
        if found is None:  # it ended inside its reasoning, which can't be rendered again without touching what was sampled
            before, sampled = array("i", self.opening("?")).tolist(), sampled[-1:]
            found = self._bridge(before, sampled, key)
        if found is None:
            roles = ", ".join(sorted({str(message.get("role")) for message in as_messages(key)}))
            raise RenderError(f"rollout.renderer {self._name} can't append messages of these roles: {roles}")
        return array("i", found).tobytes()

    def decode(self, ids: bytes) -> str:
        """As ChatRenderer.decode."""
        return self._tokenizer.decode(ids)

    def parse(self, prompt: bytes, turn: bytes) -> "ParsedTurn | None":
        """The parts of a turn, whose token ids are `turn`, as the family writes them. None where the package can't tell."""
        ids, before = array("i", turn).tolist(), array("i", prompt).tolist()
        try:
            parsed: Any = self._renderer.parse_response(ids, tools=self._tools, prompt_ids=before)
        except Exception:  # noqa: BLE001 - the package's code raises whatever Python's does, of tokens that can not be foreseen
            return None
        calls = [(call.name if call.status in ("ok", "unknown_tool") else None, call.arguments, call.raw) for call in parsed.tool_calls]
        return ParsedTurn(well_formed(parsed.content or ""), well_formed(parsed.reasoning_content or "").strip(), well_formed(calls))

    def _bridge(self, before: list[int], sampled: list[int], key: Key) -> list[int] | None:
        rendered = self._render(self._renderer.bridge_to_next_turn, key, (before, sampled), ())
        return None if rendered is None else rendered.token_ids[len(before) + len(sampled) :]

    def _render_opening(self, key: Key, *, bare: bool = False) -> bytes:
        ids = self._render(self._ids, key, (), () if bare else self._system)
        return self._tokenizer.opened(array("i", ids)).tobytes()

    def _ids(self, messages: Any, *, tools: Any, shown: Any = None) -> list[int]:
        return self._renderer.render_ids(messages, tools=shown or tools, add_generation_prompt=True)

    def _render(self, call: Callable[..., Any], key: Key, before: tuple[Any, ...], system: Sequence[Any]) -> Any:
        """`call` with messages and tools whose texts spell no control token. Raises RenderError."""
        new = as_messages(key, Forms(no_null=True))  # some families would print None
        (mark,) = unused(json.dumps(new, ensure_ascii=False) + self._fixed, 1)
        messages = self._tokenizer.guarded([*map(dict, system), *new], mark)
        with self._rendering:
            self._asked.mark = mark
            try:
                return call(*before, messages, tools=as_plain(self._tokenizer.guarded(self._tools, mark)))
            except Exception as error:  # the package's code raises whatever Python's does
                raise RenderError(f"rollout.renderer {self._name} can't render these messages: {error!r}") from error
            finally:
                self._asked.mark = ""

    def _learn_marks(self) -> None:
        """The marks that it writes around turns, tool calls and results, as far as it renders such a conversation."""
        call = {"type": "function", "function": {"name": "x", "arguments": {"x": "x"}}}
        user, result = ({"role": "user", "content": "x"}, {"role": "tool", "content": "x", "name": "x", "tool_call_id": "1"})
        said = {"role": "assistant", "content": "x"}
        calls = {**said, "reasoning_content": "x", "tool_calls": [{"id": "1", **call}]}
        tools = [{"type": "function", "function": {"name": "x", "description": "x", "parameters": {}}}]
        written: set[int] = set()
        for messages in ([user, said, user], [user, calls, result]):
            with suppress(RenderError):
                written |= {*self._render(partial(self._ids, shown=tools), observation_key(messages), (), ())}
        self._tokenizer.use_marks(self._tokenizer.marks_in(written), ())


def renderer_config(name: str, variables: Mapping[str, Any]) -> Any:
    """The package's config of renderer `name`. Raises ValueError, one sentence: not installed, no such name, or a variable that it does not have."""
    try:
        from renderers import RendererConfig, merge_chat_template_kwargs
    except ImportError as error:
        raise ValueError(
            f"rollout.renderer is {name}, but the package renderers is not installed. Install it with: pip install -e '.[renderers]'"
        ) from error
    kinds = {
        kind.model_fields["name"].default: kind
        for kind in get_args(get_args(RendererConfig)[0])
        if kind.model_fields["name"].default not in NOT_ONE_MODEL
    }
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=1)
        guess = f"Did you mean {near[0]}?" if near else f"There are {', '.join(sorted(kinds))}"
        raise ValueError(f"rollout.renderer {name} is not known to the package renderers. {guess}")
    try:
        # What was sampled stays as it is, reasoning included: transcripts only grow.
        return merge_chat_template_kwargs(kinds[name](thinking_retention="all"), variables)
    except ValueError as error:
        said = "; ".join(str(error).splitlines()[:1])
        raise ValueError(f"rollout.chat_template_kwargs do not fit rollout.renderer {name}: {said}") from error


class _Tokenizer:
    """What the package asks of a tokenizer."""

    def __init__(self, folder: Path, tokenizer: TextTokenizer) -> None:
        self.name_or_path = str(folder)
        self.mark = ""
        """Put into texts, where they are cut before they are tokenised."""
        self._tokenizer = tokenizer
        self.unk_token_id: int | None = self.convert_tokens_to_ids(tokenizer.named.get("unk_token", ""))
        self.eos_token_id: int | None = self.convert_tokens_to_ids(tokenizer.named.get("eos_token", ""))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, self.mark).tolist()

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [*token_ids]
        return self._tokenizer.raw.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        find = self._tokenizer.raw.token_to_id
        return find(tokens) if isinstance(tokens, str) else [find(token) for token in tokens]
