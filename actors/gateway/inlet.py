"""Runs a program in a sandbox without a network, beside a socket that is answered from outside: `python inlet.py FD PORT COMMAND…`.

The socket is made here, so that it is one of the sandbox's own loopback, and handed on over the socket FD. It is all that there is of it in
here: no process stays, and no file.
"""

import os
import socket
import sys

BACKLOG = 128


def main(fd: int, port: int, words: list[str]) -> None:
    """Become the program once the socket is handed on."""
    with socket.socket(fileno=fd) as outside, socket.create_server(("127.0.0.1", port), backlog=BACKLOG) as listening:
        socket.send_fds(outside, [b"\0"], [listening.fileno()])
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"can't be started: {error.strerror}: {words[0]}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
