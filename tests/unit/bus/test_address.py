import socket

import pytest

from rubato.bus.address import IPC_PATH_BYTES, Address, bare, bind_listener, check_free, host_port, is_loopback, parse, spelt
from rubato.bus.errors import BadAddress


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
        "tcp://::1:7788",
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


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:9108", "127.0.0.1", 9108),
        ("localhost:0", "localhost", 0),
        (":80", "", 80),
        ("[::1]:9108", "::1", 9108),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
    ],
)
def test_a_host_and_its_port_are_told_apart_and_spelt_together_again(text, host, port):
    found = host_port(text)

    assert found == (host, port)
    assert f"{spelt(host)}:{port}" == text
    assert bare(spelt(host)) == host


@pytest.mark.parametrize("text", ["9108", "host", "::1:9108", "[::1]", "[::1]:", "[::1]:65536", "[::1]x:1", "[a]:1", "a:b", ""])
def test_what_names_no_host_with_a_port_is_refused(text):
    with pytest.raises(BadAddress, match=r"must be a host and a port, like 127\.0\.0\.1:7788 or \[::1\]:7788"):
        host_port(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]"])
def test_a_listener_takes_an_address_of_either_kind_in_brackets_or_without(host):
    with bind_listener(host, 0) as listening, socket.create_connection(listening.getsockname()[:2], timeout=5):
        assert is_loopback(listening.getsockname()[0])
