"""An environment with a tool: what the model calls, what it calls wrongly, and what it says at the end."""

from contextlib import contextmanager
from pathlib import Path

from rubato.actors.config import EvalSection, RolloutSection
from rubato.actors.envs.chat import ChatRenderer
from rubato.actors.envs.hosting import TOOLS, EnvHost
from rubato.actors.envs.rollout import RolloutContext
from rubato.actors.envs.section import EnvSection
from rubato.actors.messages.samples import PolicyState, Ticket
from rubato.runtime.observe.figures import Waits
from tests.chat_models import chat_model
from tests.scripted_sessions import VERSION, ScriptedProxy

EXAMPLE = Path(__file__).parents[4] / "examples" / "tool_env.py"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Silent:
    def observe(self, name, value): ...

    @contextmanager
    def busy(self):
        yield


async def test_an_environment_answers_calls_and_sees_those_that_are_none(tmp_path):
    section = EnvSection.model_validate({"class": f"{EXAMPLE}:Prices", "isolation": "inline"})
    host = EnvHost(section)
    await host.start()
    renderer = ChatRenderer(chat_model(tmp_path, template=TEMPLATE), tools=host.declared[TOOLS])
    words = ('<tool_call>{"name": "price"</tool_call>', *(f'<tool_call>{{"name": "price", "arguments": {{"good": "{good}"}}}}</tool_call>' for good in ("tea", "oil")), "salt")  # fmt: skip
    proxy = ScriptedProxy(words, renderer)
    context = RolloutContext(
        env=section,
        rollout=RolloutSection(max_turns=8, max_new_tokens=100, max_len=4096),
        host=host,
        renderer=renderer,
        proxy=proxy,
        policy=lambda: PolicyState(VERSION, 1),
        metrics=Silent(),
        waits=Waits(),
        eval=EvalSection(),
    )

    trajectory = await context.rollout_of(Ticket("t1", "g1", 1, 0, 1, VERSION)).play()
    await host.close()

    first, *later = [renderer.decode(request.prompt) for request in proxy.asked]
    assert "price" in first
    assert 'user\nno such call: {"name": "price"' in later[0]
    assert later[1].rpartition("<|im_start|>tool\n")[2].partition("<|im_end|>")[0].isdigit()
    assert "<|im_start|>tool\nthere is none" in later[2]
    assert trajectory.turns == 4
    assert trajectory.reward in (-0.1, 0.9)
