"""Run a job over emulated optical circuits that its bytes feel, and compare circuits that change ahead of each phase with static ones.

python tools/fabric_testbed.py configs/quickstart_fabric.yaml
python tools/fabric_testbed.py configs/quickstart_fabric.yaml weights.broadcast=rings --modes proactive --run-dir runs/rings --json rings.json

Each rack of `fabric.racks` becomes a network namespace with one link to every other; the emulated switch sets their rates (tc htb). The
launcher runs in the first rack, and one engine joins from each other. Measured are the versions of the weights after the first few,
in which phases are profiled: sync is from publication until the last engine has swapped, by the actors' logs. Namespaces are the command's own and end with it: no root needed
where the kernel gives users some, but iproute2 and util-linux.
Both modes have the same ports and planner. Static circuits fit the traffic of all phases together, as well as one set can.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rubato.runtime.errors import ConfigError, RubatoError  # noqa: E402
from tools.fabric_job import check_places, measure  # noqa: E402
from tools.fabric_namespaces import enter  # noqa: E402

MODES = ("static", "proactive")
LEAST_VERSIONS = 3
"""The last version may come without its row of metrics, and what is told per step lies between two rows."""


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    try:
        if not args.inside:
            _check(args)
            enter([sys.executable, __file__, *argv, "--inside"])
        found = _compare(args)
    except RubatoError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(table(found))
    if args.json:
        command = " ".join(("python tools/fabric_testbed.py", *argv[:-1]))
        args.json.write_text(json.dumps({"command": command, "modes": found}, indent=1) + "\n")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError where nothing could be measured, or a path can't be used."""
    if args.versions < LEAST_VERSIONS:
        raise ConfigError(f"--versions {args.versions} is too few to measure by. Give {LEAST_VERSIONS} or more.")
    check_places(args.config, args.run_dir, args.json)


def _compare(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What was measured, by mode. Raises RubatoError."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the job's processes are ended then too
    place = args.run_dir or Path(tempfile.mkdtemp(prefix="rubato-fabric-"))
    found: dict[str, dict[str, Any]] = {}
    try:
        for mode in dict.fromkeys(args.modes):
            print(f"{mode}: running in {place / mode} …", file=sys.stderr, flush=True)
            found[mode] = measure(args.config, args.overrides, mode, place / mode, args.versions)
    finally:
        with suppress(OSError):  # it stays where there is something in it, to look into
            place.rmdir()
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """The modes side by side; times are medians or means per step."""
    columns = ("sync_s", "pull_s", "step_s", "exposed_s", "hidden_s", "reconfigurations")
    heads = ("sync s", "longest pull s", "step s", "exposed s/step", "hidden s/step", "changes/step")
    lines = ["  ".join([f"{'circuits':<10}", *heads])]
    for mode, row in found.items():
        lines.append("  ".join([f"{mode:<10}", *(f"{row[c]:>{len(h)}.3f}" for c, h in zip(columns, heads, strict=True))]))
    if set(MODES) <= set(found):
        lines.append(f"weights reach all racks {found['static']['sync_s'] / found['proactive']['sync_s']:.2f} times as fast")
    return "\n".join(lines)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "fabric_testbed", description="Run a job over emulated circuits: static ones, and ones that change ahead."
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="change single keys of the config")
    parser.add_argument("--versions", type=int, default=8, help="versions of the weights that count, per mode")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--run-dir", type=Path, help="a new folder for the runs; a temporary one by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the namespaces are there
    return parser.parse_intermixed_args(list(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
