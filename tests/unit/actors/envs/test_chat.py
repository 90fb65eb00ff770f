"""Token ids of conversations: by the template, and never touching what was sampled."""

import json
from array import array

import pytest

from rubato.actors.envs.chat import LONG, LONG_CACHED, ChatRenderer, remembering
from rubato.actors.envs.manager import EnvManager
from rubato.runtime.errors import ConfigError

END, END_OF_TEXT = 257, 258


def text_of(renderer, ids):
    return renderer._tokenizer.raw.decode(array("i", ids).tolist(), skip_special_tokens=False)


def test_a_whole_conversation_reads_as_the_template_would_render_it(model_folder):
    renderer = ChatRenderer(model_folder, system_prompt="Walk.")

    opening = renderer.opening("PF\nHG")
    sampled = array("i", [0, END]).tobytes()
    follow_up = renderer.follow_up("FP\nHG", END)

    assert text_of(renderer, opening) == (
        "<|im_start|>system\nWalk.<|im_end|>\n<|im_start|>user\nPF\nHG<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text_of(renderer, opening + sampled + follow_up).endswith(
        "assistant\n!<|im_end|>\n<|im_start|>user\nFP\nHG<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_that_was_cut_off_gets_the_end_it_lacks(model_folder):
    renderer = ChatRenderer(model_folder)

    after_cut, after_stop = renderer.follow_up("x", 5), renderer.follow_up("x", END)

    assert after_cut == array("i", [END]).tobytes() + after_stop


def test_another_stop_token_than_the_templates_own_is_kept_beside_it(model_folder):
    (model_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, END_OF_TEXT]}))
    renderer = ChatRenderer(model_folder)

    assert renderer.stop_token_ids == (END, END_OF_TEXT)
    assert renderer.follow_up("x", END_OF_TEXT) == renderer.follow_up("x", 5)


def test_white_space_before_the_templates_end_is_not_doubled(tmp_path, write_model):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.content }}\n<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    renderer = ChatRenderer(write_model(tmp_path / "m", template=template))

    assert text_of(renderer, renderer.follow_up("x", END)) == "<|im_start|>x\n<|im_end|><|im_start|>"


def test_messages_pass_through_with_their_roles(model_folder):
    renderer = ChatRenderer(model_folder)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]

    assert text_of(renderer, renderer.opening(messages)).startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu")
    assert "<|im_start|>tool\nt<|im_end|>" in text_of(renderer, renderer.follow_up([{"role": "tool", "content": "t"}], END))


def test_a_template_is_run_in_a_sandbox(tmp_path, write_model):
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"

    with pytest.raises(ValueError, match="unsafe"):
        ChatRenderer(write_model(tmp_path / "m", template=escape))


def test_a_folder_without_tokenizer_or_template_is_refused_with_a_sentence(tmp_path, write_model):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        ChatRenderer(tmp_path)
    with pytest.raises(ValueError, match="has no chat template"):
        ChatRenderer(write_model(tmp_path / "m", template=""))


def test_a_template_that_is_none_is_refused_with_a_sentence(tmp_path, write_model):
    with pytest.raises(ValueError, match=r"the chat template of .* can't be used: Expected an expression"):
        ChatRenderer(write_model(tmp_path / "m", template="{% if %}"))


@pytest.mark.parametrize(
    ("template", "given", "words"),
    [
        ("{% if %}", {}, r"the chat template of .* can't be used: Expected an expression"),
        (
            "{{ messages }}{{ enable_thinking }}",
            {"chat_template_kwargs": {"enable_thinkin": False}},
            r"does not read enable_thinkin\. Did you mean enable_thinking\?$",
        ),
        ("{{ messages }}", {"tools": [{"name": "search"}]}, r"does not read tools\."),
    ],
)
def test_a_template_that_does_not_do_is_refused_before_anything_starts(tmp_path, write_model, template, given, words):
    write_model(tmp_path / "model", template=template)
    config = EnvManager.Config.model_validate({"model": {"path": "model"}, "rollout": given})

    with pytest.raises(ConfigError, match=words):
        EnvManager.preflight(config, tmp_path)


def test_a_template_in_its_own_file_wins(model_folder):
    (model_folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")

    renderer = ChatRenderer(model_folder, turns=1)

    assert text_of(renderer, renderer.opening("hello")) == "hello!"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer.json", "{}", "can't be read as a tokenizer"),
        ("config.json", "{", "is not valid JSON"),
        ("tokenizer_config.json", "[]", "holds list instead of an object"),
    ],
)
def test_a_damaged_file_of_a_model_is_named(name, content, sentence, tmp_path, write_model):
    folder = write_model(tmp_path / "m")
    (folder / name).write_text(content)

    with pytest.raises(ValueError, match=f"{name} {sentence}"):
        ChatRenderer(folder)


def test_a_renderer_that_keeps_nothing_renders_the_same(model_folder):
    keeps, forgets = ChatRenderer(model_folder), ChatRenderer(model_folder, cached=0)

    assert forgets.opening("one") == keeps.opening("one") == keeps.opening("one")


@pytest.mark.parametrize(("length", "kept"), [(LONG - 1, 100), (LONG, LONG_CACHED)])
def test_of_long_texts_fewer_are_remembered(length, kept):
    made = []
    work = remembering(lambda text: made.append(text) or len(text), 100)
    texts = [f"{n:05d}".ljust(length) for n in range(kept)]

    assert [work(text) for text in texts + texts] == [length] * 2 * kept
    assert made == texts
    work("one more".ljust(length))
    work(texts[0])
    assert made == [*texts, "one more".ljust(length), texts[0]]
