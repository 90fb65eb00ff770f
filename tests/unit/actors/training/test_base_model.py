import json
from collections import Counter

import pytest

from actors.training import base_model

pytestmark = pytest.mark.slow

BOARD = "PFFF\nFHFH\nFFFH\nHFFG"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    shares = []
    count = base_model.make(folder, 5, lambda what, share: shares.append(share))
    return folder, count, shares


@pytest.fixture(scope="module")
def tokenizer(made):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(made[0] / "tokenizer.json"))


def test_the_model_folder_is_complete_and_of_the_stated_size(made):
    folder, count, shares = made

    names = {path.name for path in folder.iterdir()}

    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names
    assert 0.5e6 <= count <= 3e6
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_board_is_four_tokens_and_an_action_one(tokenizer):
    encoded = tokenizer.encode(f"{BOARD}<|assistant|>left<|end|>", add_special_tokens=False)

    assert encoded.tokens == ["PFFF", "\nFHFH", "\nFFFH", "\nHFFG", "<|assistant|>", "left", "<|end|>"]


@pytest.mark.parametrize("text", [BOARD, "move left now!", "a\nb", "FHGPF", "it's 4 o'clock"])
def test_any_ascii_text_comes_back_from_its_tokens(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_the_chat_template_renders_in_transformers_as_in_the_environment_manager(made):
    from transformers import AutoTokenizer

    from actors.envs.chat import ChatRenderer

    renderer = ChatRenderer(made[0])
    theirs = AutoTokenizer.from_pretrained(made[0], local_files_only=True)
    messages = [{"role": "user", "content": BOARD}]

    ours = list(memoryview(renderer.opening(BOARD)).cast("i"))

    assert ours == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert renderer.stop_token_ids == (theirs.eos_token_id,)


def test_the_base_model_answers_in_the_right_form_and_favours_no_action(made, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(made[0], local_files_only=True)
    prompt = tokenizer.encode(f"{BOARD}<|assistant|>", add_special_tokens=False).ids
    actions = [tokenizer.token_to_id(word) for word in base_model.ACTIONS]

    with torch.inference_mode():
        answer = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        after = model(torch.tensor([[*prompt, actions[0]]])).logits[0, -1].softmax(-1)

    assert answer[actions].sum() > 0.97
    assert answer[actions].max() < 0.6
    assert after[tokenizer.token_to_id(base_model.END)] > 0.97


def test_the_warm_up_shows_every_action_as_often_whatever_the_board():
    import random

    walks = base_model.random_walks(random.Random(1))
    seen = Counter(
        (turn[0] == "P", action)
        for _ in range(3000)
        for turn in next(walks).split(base_model.END)[:-1]
        for action in [turn.rsplit(base_model.ASSISTANT, 1)[1]]
    )

    for at_start in (True, False):
        counts = [seen[at_start, action] for action in base_model.ACTIONS]
        assert max(counts) < 1.35 * min(counts)


def test_main_makes_the_model_of_a_run_once_and_tells_its_progress(tmp_path, capsys, monkeypatch):
    made = []
    monkeypatch.setattr(base_model, "make", lambda folder, seed, shares: made.append((folder, seed)) or 500_000)
    (tmp_path / "config.yaml").write_text("run: {seed: 7}\nmodel: {path: model}\n")

    assert base_model.main([str(tmp_path)]) == 0

    assert made == [(tmp_path / "model", 7)]
    assert json.loads(capsys.readouterr().out)["what"] == "tiny-qwen3 0.5 M parameters, made for this run"


def test_rows_that_share_cells_begin_alike(made, tokenizer):
    """The more cells two rows share, the nearer their embeddings: what is learned of one is worth something on the other."""
    from safetensors.torch import load_file
    from torch.nn.functional import cosine_similarity

    embeddings = load_file(made[0] / "model.safetensors")["model.embed_tokens.weight"]

    def nearness(row, other):
        return float(cosine_similarity(*(embeddings[tokenizer.token_to_id(name)] for name in (row, other)), dim=0))

    shared = [nearness("FFHF", other) for other in ("\nFFHF", "FFHH", "FHHH", "HHHH", "HHFH")]
    assert shared == sorted(shared, reverse=True)
    assert shared[0] > 0.9
