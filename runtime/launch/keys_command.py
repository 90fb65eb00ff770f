"""`rubato keys new|show|join-token`: makes a run's keys, and prints what other hosts need."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from runtime.errors import LaunchError
from runtime.keys import FILE, command_for, find_keys, make_keys
from runtime.launch.folder import running
from runtime.launch.gate import way_to
from runtime.launch.token import JoinToken, write_token
from runtime.registry import NODE


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
    given = parser.parse_args(argv)
    folder = given.run.resolve()
    if given.verb == "new":
        made = make_keys(folder, replace=given.replace)
        print(f"{folder / FILE}: server {made.server.public} client {made.client.public}")  # noqa: T201
    elif given.verb == "show":
        keys = find_keys(folder)
        if keys is None:
            raise LaunchError(f"the run in {folder} has no keys. Make them with: {command_for(folder)}")
        print(f"server {keys.server.public}\nclient {keys.client.public}")  # noqa: T201
    else:
        print(_join_token(folder))  # noqa: T201
    return 0


def _folder(text: str) -> Path:
    if not text:
        raise LaunchError("--run is empty. Name the run's folder.")
    return Path(text)


def _join_token(folder: Path) -> str:
    card, keys = running(folder), find_keys(folder)
    if card.node != NODE:
        raise LaunchError(
            f"{folder} belongs to {card.node}, a host that joined the run: print the token on the run's first host, from its folder there."
        )
    if keys is None:
        raise LaunchError(f"the run in {folder} has no keys. Make them with: {command_for(folder)}")
    if not card.host:
        raise LaunchError(f"the run in {folder} is not reachable from other hosts: launch it with bus.host=ADDRESS.")
    if not card.gate and way_to(card.state_url) is not None:
        raise LaunchError(
            f"the run in {folder} was launched before it had these keys. Stop it and go on with --resume."
        )
    if not card.gate and not card.state_url.startswith("rediss://"):
        print("warning: state.url is not encrypted on the network; use rediss://", file=sys.stderr)  # noqa: T201
    return write_token(JoinToken(card.id, card.gate, card.state_url, keys))
