"""The dialects that the gateway speaks, by path. Each stands below a session's own path too."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rubato.actors.gateway import chat_api, generate_api, messages_api, responses_api, token_api
from rubato.actors.gateway.dialect import Dialect, comment, openai_error, openai_failed

_messages = Dialect(
    messages_api.asked_in, messages_api.whole, messages_api.events, messages_api.error, messages_api.failed, messages_api.waiting
)

DIALECTS: Mapping[str, Dialect[Any]] = MappingProxyType(
    {
        "/v1/chat/completions": Dialect(chat_api.asked_in, chat_api.whole, chat_api.events, openai_error, openai_failed, comment),
        "/v1/responses": Dialect(
            responses_api.asked_in, responses_api.whole, responses_api.events, openai_error, responses_api.failed, responses_api.waiting
        ),
        "/v1/messages": _messages,
        "/v1/messages/count_tokens": replace(_messages, counted=messages_api.counted),
        token_api.PATH: Dialect(generate_api.asked_in, generate_api.whole, generate_api.events, openai_error, openai_failed, comment),
    }
)
