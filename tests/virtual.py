"""Tests on virtual time: how busy the machine is decides nothing."""

import functools

from rubato.sim.virtual import run_virtual


def virtual(test):
    """Runs an asynchronous test on a virtual loop; it is deadlocked, and fails, when nothing can happen any more."""

    @functools.wraps(test)
    def run(*args, **fixtures):
        return run_virtual(lambda: test(*args, **fixtures))

    return run
