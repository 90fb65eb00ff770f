"""Keys on disk and in a token: private, whole, and never repeated in what is printed."""

from importlib.metadata import version

import pytest
from msgspec import structs

from rubato.bus.errors import BadKeys
from rubato.bus.keys import KeyPair, check_keys, new_keys
from rubato.runtime.errors import LaunchError
from rubato.runtime.launch.card import KEYS_FILE, RunKeys, find_keys
from rubato.runtime.launch.folder import RunFolder, make_keys
from rubato.runtime.launch.token import PREFIX, JoinToken, main, read_token, write_token


def test_keys_are_written_for_their_owner_alone_and_read_again(tmp_path):
    folder = tmp_path / "run"

    made = make_keys(folder)

    assert (folder / KEYS_FILE).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert find_keys(folder) == made
    assert len(made.state_password) >= 40


def test_a_run_without_keys_has_none(tmp_path):
    assert find_keys(tmp_path) is None


def test_keys_are_not_replaced_unless_that_is_asked_for(tmp_path):
    made = make_keys(tmp_path)

    with pytest.raises(LaunchError, match="Add --replace for new ones"):
        make_keys(tmp_path)

    assert find_keys(tmp_path) == made
    assert make_keys(tmp_path, replace=True) != made


def test_keys_that_others_may_read_are_refused_with_the_command_that_closes_them(tmp_path):
    make_keys(tmp_path)
    (tmp_path / KEYS_FILE).chmod(0o640)

    with pytest.raises(LaunchError, match=rf"mode 640.*chmod 600 {tmp_path / KEYS_FILE}"):
        find_keys(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"server": {"public": "a", "secret": "b"}}'])
def test_damaged_keys_are_refused_with_the_command_that_makes_new_ones(tmp_path, text):
    make_keys(tmp_path)
    (tmp_path / KEYS_FILE).write_text(text)

    with pytest.raises(LaunchError, match=rf"rubato keys new --run {tmp_path} --replace"):
        find_keys(tmp_path)


def test_halves_that_do_not_belong_together_are_named():
    keys = new_keys()
    check_keys(keys)

    with pytest.raises(BadKeys, match="the client pair is damaged"):
        check_keys(keys._replace(client=KeyPair(keys.client.public, keys.server.secret)))


def token_of(keys: RunKeys) -> JoinToken:
    return JoinToken("run-1a2b", "tcp://10.0.0.5:7788", "unix:///tmp/s?password=p", keys)


def test_a_token_holds_all_that_a_host_needs(tmp_path):
    token = token_of(make_keys(tmp_path))
    text = write_token(token)

    assert read_token(f" {text}\n") == token
    assert text.isprintable()
    assert " " not in text


@pytest.mark.parametrize("spoilt", ["", "hello", PREFIX, f"{PREFIX}AAAA", f"{PREFIX}!!!", "cut", "other"])
def test_what_is_no_whole_token_is_refused_and_not_repeated(tmp_path, spoilt):
    text = write_token(token_of(make_keys(tmp_path)))
    given: str = {"cut": text[:-40], "other": text.replace(PREFIX, "rubato9.")}.get(spoilt) or spoilt

    with pytest.raises(LaunchError, match=r"no join token.*rubato keys join-token --run DIR") as told:
        read_token(given)

    assert len(given) < 12 or given not in str(told.value)


def test_a_token_with_one_character_mistyped_is_told_apart_by_its_checksum(tmp_path):
    text = write_token(token_of(make_keys(tmp_path)))

    for place in range(len(PREFIX), len(text) - 1):  # of the last character some bits are padding
        mistyped = text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :]
        with pytest.raises(LaunchError, match=r"its checksum does not fit: it was mistyped or is not whole"):
            read_token(mistyped)


def test_a_token_of_another_version_is_refused_with_both(tmp_path):
    token = structs.replace(token_of(make_keys(tmp_path)), version="9.8.7")

    with pytest.raises(
        LaunchError, match=rf"is one of Rubato 9\.8\.7, and this host has {version('rubato-rl')}\. Install rubato-rl==9\.8\.7"
    ):
        read_token(write_token(token))


@pytest.mark.parametrize(
    ("gate", "url", "there"),
    [
        ("tcp://10.0.0.5:77", "redis+sentinel://127.0.0.1/s", ["tcp://10.0.0.5:77"]),
        (
            "",
            "redis+sentinel://:p@10.0.0.1:26380,10.0.0.2,[fd00::3]/s",
            ["tcp://10.0.0.1:26380", "tcp://10.0.0.2:26379", "tcp://[fd00::3]:26379"],
        ),
        ("", "rediss://10.0.0.7:6379/1", ["rediss://10.0.0.7:6379/1"]),
    ],
)
def test_a_host_looks_for_its_address_on_the_way_to_the_gate_or_to_one_of_the_sentinels(tmp_path, gate, url, there):
    token = structs.replace(token_of(make_keys(tmp_path)), gate=gate, state_url=url)

    assert read_token(write_token(token)).reached_at == there


def test_no_secret_is_in_what_is_logged_or_shown(tmp_path, capsys):
    keys = make_keys(tmp_path)
    assert main(["show", "--run", str(tmp_path)]) == 0
    shown = capsys.readouterr().out + repr(keys) + repr(token_of(keys)) + f"{keys.curve}"

    assert keys.server.public in shown
    assert not any(secret in shown for secret in (keys.server.secret, keys.client.secret, keys.state_password))


def test_the_command_makes_keys_and_says_where_without_the_secret_halves(tmp_path, capsys):
    assert main(["new", "--run", str(tmp_path / "a")]) == 0

    keys = find_keys(tmp_path / "a")
    assert keys is not None
    assert capsys.readouterr().out == (f"{tmp_path / 'a' / KEYS_FILE}: server {keys.server.public} client {keys.client.public}\n")


def test_a_token_of_a_run_that_is_not_there_or_has_no_keys_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(LaunchError, match="holds no run"):
        main(["join-token", "--run", str(tmp_path)])
    with pytest.raises(LaunchError, match=r"has no keys\. Make them with: rubato keys new --run"):
        main(["show", "--run", str(tmp_path)])


def test_a_run_that_is_just_starting_gives_no_token_because_it_would_lead_nowhere(tmp_path):
    folder = RunFolder(tmp_path / "run")
    card = folder.open(resume=False, force=False)  # held by this process, which lives; there is no Store yet
    folder.write(card)
    make_keys(folder.path)

    with pytest.raises(LaunchError, match=r"is just starting\. Try again"):
        main(["join-token", "--run", str(folder.path)])
    folder.close()
