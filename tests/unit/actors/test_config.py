from actors.config import ModelSection


def test_a_home_folder_is_written_out_once_for_everybody_who_reads_the_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/u")

    assert ModelSection(path="~/models/a").path == "/home/u/models/a"
    assert ModelSection(path="models/~a").path == "models/~a"
