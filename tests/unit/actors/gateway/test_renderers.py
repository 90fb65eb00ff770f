"""What a chat template does to earlier turns once others follow."""

import pytest

from rubato.actors.envs.chat import ChatRenderer
from rubato.actors.gateway.renderers import change_of
from tests.chat_models import CHATML, DEEPSEEK, chat_model

CALLS = CHATML.replace("{{ m.content }}", "{{ m.content or '' }}{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}")
ONLY_LAST = CALLS.replace("m.tool_calls or []", "((m.tool_calls or []) if messages[-1].role != 'user' else [])")
BRIEF = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if loop.last %}, be brief{% endif %}")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (CHATML, ""),
        (CALLS, ""),
        (DEEPSEEK, "leaves out what the model reasoned in earlier turns"),
        (BRIEF, "shows earlier turns otherwise"),
        (ONLY_LAST, "shows earlier calls of tools otherwise"),
    ],
)
def test_a_template_that_is_no_prefix_of_itself_is_told_by_what_it_changes(tmp_path, template, words):
    renderer = ChatRenderer(chat_model(tmp_path, template=template))

    assert change_of(renderer, renderer) == words
