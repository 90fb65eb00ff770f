"""The cluster's token: who has it may submit and cancel jobs."""

import os
import secrets
from pathlib import Path

from rubato.runtime.errors import LaunchError

FILE = "token"


def make_token(folder: Path) -> None:
    """A new one, 0600, where there is none."""
    try:
        number = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(number, "w") as file:
        file.write(secrets.token_urlsafe(32))


def read_token(folder: Path) -> str:
    """Raises LaunchError where it is missing, or others may read it."""
    path = folder / FILE
    try:
        mode = path.stat().st_mode
        token = path.read_text().strip()
    except OSError as error:
        raise LaunchError(f"{path} can't be read: {error.strerror}. A cluster's jobs are submitted by who has its token.") from None
    if mode & 0o077:
        raise LaunchError(f"{path} may be read by others (mode {mode & 0o777:o}). Close it with: chmod 600 {path}")
    if not token:
        raise LaunchError(f"{path} is empty. Remove it, and start the cluster again for a new one.")
    return token
