"""rubato doctor: what it finds and what it advises."""

from pathlib import Path

import pytest

from rubato.runtime import doctor
from rubato.runtime.doctor import DISTRIBUTION, Finding

HOME = Path("/site-packages")
TOGETHER = dict.fromkeys(doctor.PACKAGES, HOME)


def test_packages_in_one_folder_are_fine():
    assert doctor.judge_packages(TOGETHER, {"rubato": [DISTRIBUTION]}).verdict == "ok"


def test_packages_from_two_folders_are_refused():
    found = doctor.judge_packages({**TOGETHER, "bus": Path("/elsewhere")}, {})

    assert found == Finding("fail", "bus comes from /elsewhere, the others from /site-packages")


def test_another_distribution_with_our_name_is_refused():
    found = doctor.judge_packages(TOGETHER, {"rubato": [DISTRIBUTION, "rubato-stubs"]})

    assert found.verdict == "fail"
    assert found.detail.startswith("rubato-stubs brings a package of our name")


def test_a_missing_package_is_named():
    assert "planning can't be imported" in doctor.judge_packages({k: v for k, v in TOGETHER.items() if k != "planning"}, {}).detail


def test_this_installation_holds_together():
    assert doctor.check_packages().verdict == "ok"


@pytest.mark.parametrize(("name", "verdict"), [("linux", "ok"), ("darwin", "warn"), ("win32", "fail")])
def test_linux_is_supported_windows_is_not(name, verdict):
    assert doctor.check_system(name).verdict == verdict


def test_an_old_python_is_refused():
    assert doctor.check_python((3, 10)).verdict == "fail"
    assert doctor.check_python().verdict == "ok"


def test_a_temporary_folder_too_deep_for_sockets_is_refused():
    assert "Set TMPDIR to a short path" in doctor.check_temporary_folder(Path("/tmp/" + "x" * 80)).detail


def test_a_temporary_folder_that_is_not_there_is_refused():
    assert doctor.check_temporary_folder(Path("/nowhere")).verdict == "fail"


def test_a_missing_redis_is_answered_with_what_to_do(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    assert "Install one, or set state.url" in doctor.check_redis().detail


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_the_exit_code_says_whether_a_check_failed(monkeypatch, capsys, verdict, code):
    monkeypatch.setattr(doctor, "CHECKS", {"disk": lambda: Finding(verdict, "so so")})

    assert doctor.main([]) == code

    assert f"{verdict:<4}  disk  so so" in capsys.readouterr().out


def test_a_checkout_that_is_not_what_runs_is_named(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "rubato-rl"\n')
    (tmp_path / "docs").mkdir()

    found = doctor.check_checkout(tmp_path / "docs")

    assert found.verdict == "warn"
    assert f", not from {tmp_path}." in found.detail
    assert doctor.check_checkout(Path("/")).verdict == "ok"
