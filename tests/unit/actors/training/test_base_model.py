import json
import os
import random
import subprocess
import sys
from collections import Counter

import pytest

from rubato.actors.training import base_model

slow = pytest.mark.slow

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


@slow
def test_the_model_folder_is_complete_and_of_the_stated_size(made):
    folder, count, shares = made

    names = {path.name for path in folder.iterdir()}

    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert 0.5e6 <= count <= 3e6
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@slow
def test_a_board_is_four_tokens_and_an_action_one(tokenizer):
    encoded = tokenizer.encode(f"{BOARD}<|assistant|>left<|end|>", add_special_tokens=False)

    assert encoded.tokens == ["PFFF", "\nFHFH", "\nFFFH", "\nHFFG", "<|assistant|>", "left", "<|end|>"]


@slow
@pytest.mark.parametrize("text", [BOARD, "move left now!", "a\nb", "FHGPF", "it's 4 o'clock"])
def test_any_ascii_text_comes_back_from_its_tokens(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


@slow
def test_the_chat_template_renders_in_transformers_as_in_the_environment_manager(made):
    from transformers import AutoTokenizer

    from rubato.actors.envs.chat import ChatRenderer

    renderer = ChatRenderer(made[0])
    theirs = AutoTokenizer.from_pretrained(made[0], local_files_only=True)
    messages = [{"role": "user", "content": BOARD}]

    ours = list(memoryview(renderer.opening(BOARD)).cast("i"))

    assert ours == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert renderer.stop_token_ids == (theirs.eos_token_id,)


@slow
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


@slow
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


# -- a run's model, and the user's cache of them -------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Gives the folder of a run of `seed`; models are made as files of their seed, and `run.made` counts them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(folder, seed, progress):
        run.made.append(seed)
        folder.mkdir(parents=True, exist_ok=True)
        for name in base_model.FILES:
            (folder / name).write_text(f"{name} of seed {seed}")
        return 500_000

    def run(name, seed=7):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"run: {{seed: {seed}}}\nmodel: {{path: model}}\n")
        return tmp_path / name

    run.made = []
    run.make = make
    return run


def prepared(run, folder, capsys):
    """What was told of the model of the run in `folder`, which is whole."""
    assert base_model.main([str(folder)], run.make) == 0
    seed = (folder / "config.yaml").read_text().partition("seed: ")[2].partition("}")[0]
    assert {p.name: p.read_text() for p in (folder / "model").iterdir()} == {name: f"{name} of seed {seed}" for name in base_model.FILES}
    return json.loads(capsys.readouterr().out.splitlines()[-1])["what"]


def test_a_run_s_model_is_made_once_and_later_runs_of_its_seed_take_it_from_the_cache(run, capsys):
    assert prepared(run, run("one"), capsys) == "tiny-qwen3 0.5 M parameters, made for this run"
    assert prepared(run, run("two"), capsys).startswith("tiny-qwen3 as made before")
    assert "made for this run" in prepared(run, run("three", seed=8), capsys)

    assert run.made == [7, 8]


def test_a_model_that_lies_in_the_run_folder_is_left_alone(run, capsys):
    prepared(run, folder := run("one"), capsys)

    assert "found in the run folder" in prepared(run, folder, capsys)


@pytest.mark.parametrize("damage", [b"", b"short", None], ids=["empty", "short", "one byte"])
def test_a_damaged_entry_is_made_again_and_replaced(run, capsys, damage):
    prepared(run, run("one"), capsys)
    entry = base_model.cache_entry(7, run.make)
    data = entry.read_bytes()
    entry.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if damage is None else damage)

    assert "made for this run" in prepared(run, run("two"), capsys)
    assert "as made before" in prepared(run, run("three"), capsys)


def test_without_leave_to_write_there_nothing_is_kept_and_nothing_fails(run, capsys, tmp_path):
    (tmp_path / "cache").write_text("a file where the cache would be")

    for name in ("one", "two"):
        assert "made for this run" in prepared(run, run(name), capsys)
    assert (tmp_path / "cache").is_file()


def test_the_cache_keeps_the_newest_and_no_half_written_ones(run, capsys, monkeypatch):
    monkeypatch.setattr(base_model, "KEPT", 2)
    for seed in (1, 2, 3):
        prepared(run, run(f"run-{seed}", seed), capsys)
        os.utime(base_model.cache_entry(seed, run.make), (seed, seed))

    kept = {path.name for path in base_model.cache_entry(1, run.make).parent.iterdir()}

    assert kept == {base_model.cache_entry(seed, run.make).name for seed in (2, 3)}


@slow
def test_two_runs_at_once_share_the_cache(run):
    folders = [run("one"), run("two")]
    command = [sys.executable, "-m", "rubato.actors.training.base_model"]
    makers = [subprocess.Popen([*command, str(folder)], stdout=subprocess.DEVNULL) for folder in folders]

    assert [maker.wait(240) for maker in makers] == [0, 0]

    models = [{p.name: p.read_bytes() for p in (folder / "model").iterdir()} for folder in folders]
    assert models[0] == models[1]
    assert [path.name for path in base_model.cache_entry(7).parent.iterdir()] == [base_model.cache_entry(7).name]
