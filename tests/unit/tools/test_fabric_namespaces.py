"""The test-bed goes into namespaces of its own where it may, and says why not in one sentence."""

import os
import signal
import sys
import tempfile

import pytest

from tools import fabric_namespaces, fabric_testbed
from tools.fabric_namespaces import PACKAGES, NoNamespaces, enter

REFUSES = "echo 'unshare: unshare failed: Operation not permitted' >&2; exit 1"
NEEDS_A_USER_NAMESPACE = 'test "$1" = --user'


class Gone(Exception):
    """What became of the process."""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Makes the PATH, where `unshare` does what the given line says; `exec` ends in Gone."""

    def make(line, *, without=()):
        for name in set(PACKAGES) - set(without):
            (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    def execvpe(file, words, environment):
        raise Gone(words)

    monkeypatch.setattr(fabric_namespaces, "SYSTEM_FOLDERS", ())
    monkeypatch.setattr(os, "execvpe", execvpe)
    return make


def test_who_may_have_namespaces_gets_no_user_namespace(tools):
    tools("exit 0")

    with pytest.raises(Gone) as gone:
        enter(["job", "a word"])

    words = gone.value.args[0]
    assert words[:3] == ["unshare", "--net", "--mount"]
    assert words[-2:] == ["job", "a word"]


def test_who_may_not_have_them_is_root_in_a_user_namespace(tools):
    tools(NEEDS_A_USER_NAMESPACE)

    with pytest.raises(Gone) as gone:
        enter(["job"])

    assert gone.value.args[0][:3] == ["unshare", "--user", "--map-root-user"]


def test_a_refusal_says_what_the_kernel_said_and_which_setting_it_was(tools, monkeypatch):
    tools(REFUSES)
    monkeypatch.setattr(fabric_namespaces, "REFUSALS", {"kernel/ostype": "Linux"})

    with pytest.raises(NoNamespaces, match=r"Operation not permitted\). kernel.ostype is Linux: change it"):
        enter(["job"])


def test_missing_tools_are_named_with_their_packages(tools):
    tools("exit 0", without=("tc", "unshare"))

    with pytest.raises(NoNamespaces, match=r"no tc and no unshare on the PATH. Install iproute2 and util-linux\.$"):
        enter(["job"])


def test_the_command_goes_on_inside_with_its_own_words(tools, tmp_path):
    tools("exit 0")
    words = [str(tmp_path / "job.yaml"), "env.concurrency=2", "--modes", "static", "proactive"]

    with pytest.raises(Gone) as gone:
        fabric_testbed.main(words)

    assert gone.value.args[0][-8:] == [sys.executable, fabric_testbed.__file__, *words, "--inside"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "no test-bed: the kernel gives this user no namespaces (unshare: unshare failed: Operation not permitted)"),
        (["--run-dir", "/run/rubato"], "/run/rubato is in /run, which is hidden from the test-bed"),
        (["--json", "/run/found.json"], "/run/found.json is in /run, which is hidden from the test-bed"),
        (["--json", "/proc/found.json"], "--json /proc/found.json can't be written: "),
        (["--json", "/"], "--json / can't be written: Is a directory. Give another file."),
        (["--versions", "0"], "--versions 0 is too few to measure by. Give 3 or more."),
        (["--versions", "2"], "--versions 2 is too few to measure by. Give 3 or more."),
    ],
)
def test_what_can_not_be_is_one_sentence_and_exit_2(options, said, tools, tmp_path, capsys):
    tools(REFUSES)

    code = fabric_testbed.main([str(tmp_path / "job.yaml"), *options])

    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.startswith(said)
    assert printed.err.count("\n") == 1


def test_a_file_for_the_figures_is_only_tried_and_keeps_what_is_in_it(tools, tmp_path):
    tools("exit 0")
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("{}")

    for file in (old, new):
        with pytest.raises(Gone):
            fabric_testbed.main([str(tmp_path / "job.yaml"), "--json", str(file)])

    assert old.read_text() == "{}"
    assert not new.exists()


@pytest.mark.parametrize("config", ["", "fabric: {ports: 1}", "actors: {}"])
def test_a_config_that_can_not_be_leaves_no_folder(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "job.yaml").write_text(config)
    ends = signal.getsignal(signal.SIGTERM)

    try:
        code = fabric_testbed.main([str(tmp_path / "job.yaml"), "--inside"])
    finally:
        signal.signal(signal.SIGTERM, ends)

    assert code == 2
    assert str(tmp_path / "job.yaml") in capsys.readouterr().err
    assert list((tmp_path / "tmp").iterdir()) == []
