"""Models by their name at a hub, against a hub on loopback: what a name stands for, what is fetched, and what is said where that fails."""

import shutil
from pathlib import Path

import pytest

from rubato.actors.config import HubName, name_of
from rubato.actors.hub import names
from rubato.runtime.errors import ConfigError
from tests.hub import model_files, use

FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"w" * 200_000, "tf_model.h5": b"h", ".gitattributes": b"x"}


def asked_for(name: str, key: str = "model.path") -> dict:
    """A config that names it."""
    tree: dict = {}
    inner = tree
    *above, last = key.split(".")
    for part in above:
        inner = inner.setdefault(part, {})
    inner[last] = name
    return tree


def pinned(name: str, folder: Path, key: str = "model.path") -> str:
    changes, _ = names.pin(asked_for(name, key), folder)
    return changes[tuple(key.split("."))]


def refused(name: str, folder: Path, key: str = "model.path") -> str:
    with pytest.raises(ConfigError) as error:
        names.pin(asked_for(name, key), folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def fetch(name: str, folder: Path, key: str = "model.path") -> int:
    folder.mkdir(exist_ok=True)
    section, _, last = key.rpartition(".")
    (folder / "config.yaml").write_text(f"{section}: {{{last}: {name}}}\n")
    return names.main([str(folder)])


@pytest.mark.parametrize("text", ["model", "./a/b", "../a/b", "/a/b", "~/a/b", "a/b/c", "a/b c", "a/b@", "", "https://a/b", "a/"])
def test_what_has_another_form_than_owner_and_name_is_a_path(text):
    assert name_of(text) is None


def test_a_name_may_bring_its_revision():
    assert name_of("Qwen/Qwen3-0.6B@refs/pr/1") == HubName("Qwen/Qwen3-0.6B", "refs/pr/1")


def test_a_name_is_pinned_to_the_commit_of_its_main_branch_and_a_revision_to_its_own(there, tmp_path):
    first = there.add("acme/tiny", FILES)
    there.tag("acme/tiny", "v1", first)
    second = there.add("acme/tiny", {**FILES, "README.md": b"new"})

    assert pinned("acme/tiny", tmp_path) == f"acme/tiny@{second}"
    assert pinned("acme/tiny@v1", tmp_path) == f"acme/tiny@{first}"
    assert pinned(f"acme/tiny@{first}", tmp_path) == f"acme/tiny@{first}"


def test_what_lies_in_the_run_folder_is_no_name_and_the_hub_is_not_asked(there, tmp_path):
    (tmp_path / "acme" / "tiny").mkdir(parents=True)

    assert names.pin(asked_for("acme/tiny"), tmp_path) == ({}, [])
    assert there.requests == []


def test_a_folder_beside_the_run_is_not_taken_for_a_name(there, tmp_path, monkeypatch):
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert f"For the folder here write model.path={tmp_path}/acme/tiny" in refused("acme/tiny", tmp_path / "run")
    assert there.requests == []


def test_a_model_is_fetched_whole_and_nothing_else_of_its_repository(there, tmp_path):
    files = model_files()
    there.add("acme/tiny", {**files, "onnx/model.onnx": b"o", "onnx/config.json": b"{}", "chat_templates/tools.jinja": b"t"})
    name = pinned("acme/tiny", tmp_path)

    assert fetch(name, tmp_path / "run") == 0

    folder = tmp_path / "run" / name
    brought = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert brought == files.keys() - {"pytorch_model.bin"} | {"chat_templates/tools.jinja"}
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_of_weights_in_several_files_those_are_fetched_that_the_index_names(there, tmp_path):
    index = b'{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
    weights = {"one.safetensors": b"1" * 70_000, "two.safetensors": b"2", "consolidated.safetensors": b"3"}
    there.add("acme/large", {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors.index.json": index, **weights})
    name = pinned("acme/large", tmp_path)

    assert fetch(name, tmp_path / "run") == 0

    assert {path.name for path in (tmp_path / "run" / name).glob("*.safetensors")} == {"one.safetensors", "two.safetensors"}


def test_a_second_run_and_a_resumed_one_fetch_nothing_again(there, tmp_path):
    there.add("acme/tiny", FILES)
    name = pinned("acme/tiny", tmp_path)
    fetch(name, tmp_path / "run")
    there.requests.clear()

    assert fetch(name, tmp_path / "run") == 0
    assert there.requests == []
    assert fetch(name, tmp_path / "other") == 0
    assert not [each for each in there.requests if "/resolve/" in each or "/store/" in each]


def test_a_link_whose_cache_was_deleted_is_made_again_at_the_same_commit(there, tmp_path):
    there.add("acme/tiny", FILES)
    name = pinned("acme/tiny", tmp_path)
    fetch(name, tmp_path / "run")
    there.add("acme/tiny", {**FILES, "config.json": b'{"new": 1}'})
    shutil.rmtree(tmp_path / "cache")

    assert fetch(name, tmp_path / "run") == 0

    assert (tmp_path / "run" / name / "config.json").read_bytes() == b"{}"


def test_offline_the_cache_answers_and_the_launch_says_so(there, tmp_path, monkeypatch):
    commit = there.add("acme/tiny", FILES)
    fetch(pinned("acme/tiny", tmp_path), tmp_path / "run")
    use(there, monkeypatch, tmp_path, offline=True)
    there.requests.clear()

    changes, said = names.pin(asked_for("acme/tiny"), tmp_path)

    assert changes == {("model", "path"): f"acme/tiny@{commit}"}
    assert said == [f"model.path=acme/tiny: HF_HUB_OFFLINE is set, so commit {commit[:12]} is taken, which the cache has"]
    assert fetch(f"acme/tiny@{commit}", tmp_path / "other") == 0
    assert there.requests == []


def test_offline_without_a_cache_says_what_to_do(there, tmp_path, monkeypatch):
    there.add("acme/tiny", FILES)
    use(there, monkeypatch, tmp_path, offline=True)

    said = refused("acme/tiny", tmp_path)

    assert said == f"model.path=acme/tiny is not in the cache {tmp_path / 'cache'}, and HF_HUB_OFFLINE is set: unset it, or name a folder."


def test_half_of_a_model_in_the_cache_is_not_taken_for_it(there, tmp_path, monkeypatch, capsys):
    there.add("acme/tiny", FILES)
    name = pinned("acme/tiny", tmp_path)
    use(there, monkeypatch, tmp_path, offline=True)

    code = fetch(name, tmp_path / "run")

    assert code == 1
    assert "or not all of it, and HF_HUB_OFFLINE is set: unset it, or name a folder." in capsys.readouterr().err
    assert not (tmp_path / "run" / name).exists()


def test_a_hub_that_is_away_is_told_from_a_name_that_is_not_there(there, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "and http://127.0.0.1:9 can't be reached (" in refused("acme/tiny", tmp_path)

    monkeypatch.setattr(constants, "ENDPOINT", there.url)
    assert f"{there.url} has no model acme/tiny that a visitor without login" in refused("acme/tiny", tmp_path)


def test_a_hub_out_of_order_is_quoted(there, tmp_path):
    there.add("acme/tiny", FILES)
    there.broken = True

    assert f"model.path=acme/tiny: {there.url}/acme/tiny answered with an error: Server error '500" in refused("acme/tiny", tmp_path)


def test_a_gated_model_says_which_login_has_no_access(there, tmp_path, monkeypatch):
    there.add("acme/gated", FILES, gated=True, allowed=("ann",))
    there.users |= {"of-bob": "bob", "of-ann": "ann"}

    assert "is gated, and a visitor without login (none is set here) has no access to it" in refused("acme/gated", tmp_path)
    use(there, monkeypatch, tmp_path, token="of-bob")
    assert f"{there.url}/acme/gated is gated, and the login bob has no access to it: ask for it on that page" in refused(
        "acme/gated", tmp_path
    )
    use(there, monkeypatch, tmp_path, token="of-ann")
    assert fetch(pinned("acme/gated", tmp_path), tmp_path / "run") == 0


def test_a_private_model_needs_its_login(there, tmp_path, monkeypatch):
    there.add("acme/private", FILES, private=True, allowed=("ann",))
    there.users |= {"of-ann": "ann"}

    assert "for a private one log in with `hf auth login`, or set HF_TOKEN." in refused("acme/private", tmp_path)
    use(there, monkeypatch, tmp_path, token="of-nobody")
    assert "that the login set here, which the hub does not know, may see" in refused("acme/private", tmp_path)
    use(there, monkeypatch, tmp_path, token="of-ann")
    assert fetch(pinned("acme/private", tmp_path), tmp_path / "run") == 0


def test_a_revision_that_is_not_there_is_named(there, tmp_path):
    there.add("acme/tiny", FILES)

    assert refused("acme/tiny@v9", tmp_path) == (
        f"model.path=acme/tiny@v9: {there.url}/acme/tiny has no revision v9. Name a branch, a tag or a commit of it."
    )


@pytest.mark.parametrize(
    ("files", "key", "sentence"),
    [
        ({"README.md": b""}, "model.path", "has no config.json, so it is no model in Hugging Face's format."),
        ({"config.json": b"{}", "model.gguf": b"g"}, "train.reference", "has no model.safetensors, nor model.safetensors.index.json"),
        (FILES, "train.lora.start", "has no adapter_config.json, so it is no adapter in Hugging Face's format."),
    ],
)
def test_a_repository_that_holds_something_else_is_refused(there, tmp_path, files, key, sentence):
    there.add("acme/other", files)

    said = refused("acme/other", tmp_path, key)

    assert said.startswith(f"{key}=acme/other: ")
    assert sentence in said


def test_an_adapter_is_fetched_too(there, tmp_path):
    there.add("acme/adapter", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a"})
    name = pinned("acme/adapter", tmp_path, "train.lora.start")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(f"train: {{lora: {{start: {name}}}}}\n")

    assert names.main([str(tmp_path / "run")]) == 0

    assert (tmp_path / "run" / name / "adapter_model.safetensors").read_bytes() == b"a"


def test_every_name_that_cant_be_had_is_told(there, tmp_path):
    tree = {"model": {"path": "acme/one"}, "train": {"reference": "acme/two"}}

    with pytest.raises(ConfigError) as error:
        names.pin(tree, tmp_path)

    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == ["model.path=acme/one", "train.reference=acme/two"]


def test_a_model_that_the_disk_has_no_room_for_is_refused_before_it_is_fetched(there, tmp_path, monkeypatch, capsys):
    there.add("acme/tiny", FILES)
    name = pinned("acme/tiny", tmp_path)
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)

    assert fetch(name, tmp_path / "run") == 1

    assert "Set HF_HOME elsewhere." in capsys.readouterr().err
    assert not [each for each in there.requests if "/store/" in each]
