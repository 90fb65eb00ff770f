"""`rubato keys new|show|join-token`, and the join token: all that a second host needs to enter a job."""

import argparse
import base64
import re
import sys
import zlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from rubato.bus.address import bare, spelt
from rubato.bus.errors import BadKeys
from rubato.bus.keys import check_keys
from rubato.runtime.config.source import fill
from rubato.runtime.errors import LaunchError
from rubato.runtime.launch.card import KEYS_FILE, RunKeys, command_for, find_keys, running
from rubato.runtime.launch.folder import make_keys
from rubato.runtime.launch.gate import way_to
from rubato.runtime.registry import NODE
from rubato.runtime.store.redis import SENTINELS

PREFIX = "rubato1."
"""Names the format, so that a later one can be told apart."""
SUM_BYTES = 4
"""A CRC-32 ends the token, so that one that was mistyped or cut is told apart from one that leads nowhere."""

HOST = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:-]{0,252}")
"""Names of hosts, and addresses without brackets."""


def version_here() -> str:
    """The version of Rubato that is installed here; empty in a checkout of which none is."""
    try:
        return version("rubato-rl")
    except PackageNotFoundError:
        return ""


class JoinToken(msgspec.Struct, frozen=True, array_like=True):
    """`gate` is the first host's tcp address that leads to the Store; empty where every host reaches `state_url` itself."""

    run_id: str
    gate: str
    state_url: str
    keys: RunKeys
    version: str = msgspec.field(default_factory=version_here)
    """Of Rubato on the host that made it: another one may know neither the config nor the messages."""

    @property
    def url(self) -> str:
        """`state_url` with its variables. Raises ConfigError where one is not set here."""
        return fill(self.state_url, "state.url").value

    @property
    def reached_at(self) -> list[str]:
        """URLs of the hosts of which a host that joins has to reach one at least. Raises ConfigError, and StoreError."""
        if self.gate or not self.url.startswith(SENTINELS):
            return [self.gate or self.url]
        from rubato.runtime.store.sentinel import parse  # of no use to most

        return [f"tcp://{spelt(host)}:{port}" for host, port in parse(self.url).hosts]

    def __repr__(self) -> str:
        return f"JoinToken({self.run_id}, {self.gate})"


def write_token(token: JoinToken) -> str:
    data = msgspec.msgpack.encode(token)
    return PREFIX + base64.urlsafe_b64encode(data + _sum(data)).decode().rstrip("=")


def read_token(text: str) -> JoinToken:
    """Raises LaunchError for what is not a whole token, or is of another version; its text is never repeated, because it is a secret."""
    body = text.strip().removeprefix(PREFIX)
    try:
        if body == text.strip():
            raise ValueError(f"it does not begin with {PREFIX}")
        whole = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
        data = whole[:-SUM_BYTES]
        if whole[-SUM_BYTES:] != _sum(data):
            raise ValueError("its checksum does not fit: it was mistyped or is not whole")
        token = msgspec.msgpack.decode(data, type=JoinToken)
        check_keys(token.keys.curve)
        if token.gate or not token.url.startswith(SENTINELS):
            there = urlsplit(token.gate or token.url)
            if not there.hostname or there.port == 0:
                raise ValueError("it names no address that another host could come to")
    except (ValueError, msgspec.MsgspecError, BadKeys) as error:
        raise LaunchError(f"this is no join token ({error}). Print one on the first host with: rubato keys join-token --run DIR") from None
    if token.version and (ours := version_here()) and token.version != ours:
        raise LaunchError(
            f"the run {token.run_id} is one of Rubato {token.version}, and this host has {ours}. Install rubato-rl=={token.version} here."
        )
    return token


def _sum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(SUM_BYTES, "big")


# -- the command -----------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run one of the three; RubatoError is the caller's to print."""
    parser = argparse.ArgumentParser("rubato keys", description="Keys with which a run admits other hosts.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, text in {
        "new": "make keys for the run in DIR, before it is launched with bus.host=ADDRESS",
        "show": "print the public halves",
        "join-token": "print the token with which a host joins the run; it is a secret",
    }.items():
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("--run", type=_folder, required=True, metavar="DIR")
        if name == "new":
            verb.add_argument("--replace", action="store_true", help="make new keys although there are some")
        elif name == "join-token":
            help_host = "the name, in place of bus.host, by which hosts come: one that stays where this host's address changes"
            verb.add_argument("--host", default="", metavar="NAME", help=help_host)
    given = parser.parse_args(argv)
    folder = given.run.resolve()
    if given.verb == "new":
        made = make_keys(folder, replace=given.replace)
        print(f"{folder / KEYS_FILE}: server {made.server.public} client {made.client.public}")  # noqa: T201
    elif given.verb == "show":
        keys = find_keys(folder)
        if keys is None:
            raise LaunchError(f"the run in {folder} has no keys. Make them with: {command_for(folder)}")
        print(f"server {keys.server.public}\nclient {keys.client.public}")  # noqa: T201
    else:
        print(_join_token(folder, given.host))  # noqa: T201
        again = f"{command_for(folder)} --replace"
        print(f"it does not expire; {again} and a resume void it", file=sys.stderr)  # noqa: T201
    return 0


def _folder(text: str) -> Path:
    if not text:
        raise LaunchError("--run is empty. Name the run's folder.")
    return Path(text)


def _join_token(folder: Path, host: str = "") -> str:
    """With `host` in place of the gate's own."""
    card, keys = running(folder), find_keys(folder)
    if card.node != NODE:
        raise LaunchError(
            f"{folder} belongs to {card.node}, a host that joined the run: print the token on the run's first host, from its folder there."
        )
    if keys is None:
        raise LaunchError(f"the run in {folder} has no keys. Make them with: {command_for(folder)}")
    if not card.host:
        raise LaunchError(f"the run in {folder} is not reachable from other hosts: launch it with bus.host=ADDRESS.")
    if not card.gate and way_to(card.url) is not None:
        raise LaunchError(f"the run in {folder} was launched before it had these keys. Stop it and go on with --resume.")
    if not card.gate and not card.url.startswith("rediss"):
        scheme = card.url.partition("://")[0].replace("redis", "rediss")
        print(f"warning: state.url is not encrypted on the network; use {scheme}://", file=sys.stderr)  # noqa: T201
    gate = card.gate
    if host:
        if not gate:
            raise LaunchError(f"--host {host} is of no use: hosts reach this run's state by its state.url.")
        if not HOST.fullmatch(bare(host)):
            raise LaunchError(f"--host {host} is no name of a host, and no address.")
        gate = f"tcp://{spelt(bare(host))}:{urlsplit(gate).port}"
    return write_token(JoinToken(card.id, gate, card.state_url, keys))
