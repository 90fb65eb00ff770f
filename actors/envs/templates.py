"""What a model folder says of its text: the tokenizer, special tokens, ends of turn, and the chat template, rendered as transformers does."""

import difflib
import json
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from rubato.runtime.observe.trace import wall_s


class RenderError(ValueError):
    """Messages that a chat template or a renderer can't make a prompt of, in one sentence."""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__} instead of an object")
    return cast("dict[str, Any]", found)


def read_tokenizer(folder: Path) -> tuple[Any, dict[str, str], bool | None]:
    """The tokenizer of a model folder, its special tokens by name, and its `add_bos_token`. Raises ValueError, one sentence."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"model folder {folder} has no tokenizer.json{_instead(folder)}")
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # it raises nothing narrower
        raise ValueError(f"{path} can't be read as a tokenizer: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    named: dict[str, str] = {}
    for key, value in [*_read_json(folder / "special_tokens_map.json").items(), *config.items()]:
        if key.endswith("_token") and isinstance(text := value.get("content") if _is_map(value) else value, str):
            named[key] = text
    add_bos = config.get("add_bos_token")
    return tokenizer, named, add_bos if isinstance(add_bos, bool) else None


def _instead(folder: Path) -> str:
    """What to do with a tokenizer of another kind that lies there; empty where none does."""
    others = ("tokenizer.model", "tiktoken.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")
    found = [name for name in others if (folder / name).is_file()]
    load = f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
    return f", only {' and '.join(found)}. Make one: from transformers import AutoTokenizer; {load}" if found else ""


def ids_in_configs(folder: Path, name: str) -> list[int]:
    """Token ids under `name`, such as eos_token_id, in generation_config.json and config.json, there also of a nested model of text."""
    generation, config = (_read_json(folder / file) for file in ("generation_config.json", "config.json"))
    nested = [config[key] for key in ("text_config", "llm_config", "language_config") if _is_map(config.get(key))]
    found: list[int] = []
    for values in (generation, config, *nested):
        given = values.get(name)
        ids = cast("list[Any]", given) if isinstance(given, list) else [given]
        found += [each for each in ids if isinstance(each, int) and not isinstance(each, bool) and each >= 0]
    return [*dict.fromkeys(found)]


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def template_of(folder: Path) -> str:
    """The chat template of a model folder. Raises ValueError, one sentence, where it has none."""
    file = folder / "chat_template.jinja"
    found = file.read_text(encoding="utf-8") if file.is_file() else _read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in cast("list[dict[str, str]]", found)}
        found = named.get("default")
    if not found:
        raise ValueError(f"model folder {folder} has no chat template (chat_template.jinja or in tokenizer_config.json)")
    return cast("str", found)


class Forms(NamedTuple):
    """In which of the forms that OpenAI's API has a template takes messages."""

    parts: bool = False
    """Content as a list of parts, where it is one text too."""
    text_arguments: bool = False
    """The arguments of a tool call as JSON in a text, as the API has them, and not as the object that most templates take."""
    no_null: bool = False
    """Content that is null as an empty text."""


PLAIN = Forms()
"""What most take."""

MARKS = "rubato_marks"
"""Variable of each rendering: the characters that the renderer has put into texts, which `tojson` leaves as they are."""


def compiled(source: str, folder: Path, given: Collection[str]) -> Any:
    """A chat template of jinja. Templates come with models, from anywhere: they run in jinja's sandbox.

    Raises ValueError, one sentence, for a template that is none, or never reads one of the variables `given`.
    """
    from jinja2 import TemplateError, meta

    env = _environment()
    try:
        read = meta.find_undeclared_variables(env.parse(source))
        made = env.from_string(source)
        made.globals = {**made.globals}  # not chained: each rendering copies them
    except (TemplateError, SyntaxError, RecursionError) as error:
        raise ValueError(f"the chat template of {folder} can't be used: {error}") from error
    for name in sorted({*given} - read):
        near = difflib.get_close_matches(name, read, n=1)
        guess = f"Did you mean {near[0]}?" if near else f"It reads {', '.join(sorted(read))}"
        raise ValueError(f"the chat template of {folder} does not read {name}. {guess}")
    return made


def _environment() -> Any:
    """Tags, filters and functions as transformers gives them to chat templates."""
    from jinja2 import TemplateError, nodes, pass_context
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}: what the model says, for masks that are not needed here."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

        def _said(self, caller: Any) -> str:
            return caller()

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(given: str) -> str:
        return datetime.fromtimestamp(wall_s()).astimezone().strftime(given)

    @pass_context
    def tojson(
        context: Any, value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:  # fmt: skip
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        marks = context.get(MARKS) or ""
        escaped = (c if c.isascii() or c in marks else json.dumps(c)[1:-1] for c in text)
        return "".join(escaped) if ensure_ascii else text

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = strftime_now
    return env
