import socket

import pytest

from bus.address import IPC_PATH_BYTES, Address, check_free, parse
from bus.errors import BadAddress


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ipc:///run/rubato/engine-1.3", Address("ipc", "/run/rubato/engine-1.3")),
        ("tcp://127.0.0.1:7788", Address("tcp", "127.0.0.1", 7788)),
        ("tcp://127.3.2.1:*", Address("tcp", "127.3.2.1", 0)),
        ("tcp://localhost:0", Address("tcp", "localhost", 0)),
        ("tcp://[::1]:65535", Address("tcp", "[::1]", 65535)),
        ("tcp://127.0.0.1:31000-31100", Address("tcp", "127.0.0.1", 31000, 31100)),
        ("mem://engine-1.3", Address("mem", "engine-1.3")),
    ],
)
def test_addresses_that_need_no_keys_are_parsed(text, address):
    assert parse(text) == address


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.0.0.5", "[::]", "node-7.cluster", "127.0.0.1.example.com"])
def test_tcp_beyond_this_host_is_refused_with_the_command_that_makes_keys(host):
    with pytest.raises(BadAddress) as caught:
        parse(f"tcp://{host}:7788")

    assert str(caught.value) == f"tcp://{host}:7788 needs keys. Make them with: rubato keys new --run RUN"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ipc:",
        "ipc://",
        "/run/rubato/engine-1",
        "http://127.0.0.1:80",
        "ipc://relative/path",
        "ipc://@abstract",
        "ipc:///a\0b",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:-1",
        "tcp://127.0.0.1:http",
        "tcp://127.0.0.1:31100-31000",
        "tcp://127.0.0.1:31000-",
        "tcp://127.0.0.1:0-10",
        "tcp://127.0.0.1:1-65536",
        "tcp://127.0.0.1:٣",
        "tcp://:7788",
    ],
)
def test_malformed_addresses_are_refused(text):
    with pytest.raises(BadAddress):
        parse(text)


def test_a_socket_path_longer_than_the_system_allows_is_refused_with_both_lengths():
    fits = "/" + "a" * (IPC_PATH_BYTES - 1)

    assert parse(f"ipc://{fits}").place == fits
    with pytest.raises(BadAddress, match=r"has 108 bytes and the system allows 107; use a shorter folder"):
        parse(f"ipc://{fits}b")


def test_the_length_of_a_socket_path_counts_bytes_not_letters():
    with pytest.raises(BadAddress, match="has 121 bytes"):
        parse("ipc:///" + "ü" * 60)


def test_a_path_with_a_listener_is_taken_and_one_left_behind_is_free(tmp_path):
    path = tmp_path / "engine-1"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    with pytest.raises(BadAddress, match="taken by a living process"):
        check_free(str(path))

    listener.close()
    check_free(str(path))


def test_a_path_that_is_a_file_or_whose_folder_is_missing_is_refused(tmp_path):
    (tmp_path / "file").write_text("precious")

    with pytest.raises(BadAddress, match="is not a socket"):
        check_free(f"{tmp_path}/file")
    with pytest.raises(BadAddress, match="does not exist"):
        check_free(f"{tmp_path}/missing/engine-1")
    with pytest.raises(BadAddress, match="cannot be bound"):
        check_free(f"{tmp_path}/file/engine-1")
    check_free(f"{tmp_path}/free")
