"""`python -m tests.contract.placed_command WHAT…`: stands for the command that joins a host, and does one thing that such a command may do."""

import os
import signal
import sys
import time


def main(what: str, *rest: str) -> int:
    token = sys.stdin.readline().strip()
    if what == "exit":  # CODE SENTENCE
        print(rest[1], file=sys.stderr)
        return int(rest[0])
    if what == "expect":  # TOKEN
        return 0 if token == rest[0] else 4
    if what == "tell":  # VARIABLE
        print(os.environ.get(rest[0]), file=sys.stderr)
        return 0
    signal.signal(signal.SIGTERM, signal.SIG_IGN if what == "deaf" else lambda *_: sys.exit(130))
    print("up", flush=True)
    while True:
        time.sleep(1000)  # noqa: TID251 - it does nothing else until a signal


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
