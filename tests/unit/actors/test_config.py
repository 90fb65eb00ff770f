from actors.config import ModelSection
from runtime.config.source import differing


def test_a_home_folder_is_written_out_once_for_everybody_who_reads_the_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/u")

    assert ModelSection(path="~/models/a").path == "/home/u/models/a"
    assert ModelSection(path="models/~a").path == "models/~a"
    assert differing({"model": {"path": "~/m"}}, {"model": {"path": "/home/u/m"}}) == []
    assert differing({"model": {"path": "~/m"}}, {"model": {"path": "/home/u/n"}}) == ["model.path"]
