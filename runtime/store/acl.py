"""What the run's user may do on its Redis: our keys and the commands that our scripts use, nothing that configures or lists a server."""

USER = "rubato"
KEYS = "~rubato:*"

COMMANDS = (
    "del", "eval", "evalsha", "exists", "get", "hdel", "hget", "hincrby", "hkeys", "hmget", "hset", "info", "set", "time", "xadd",
    "xrange", "xread", "xtrim", "zadd", "zrange", "zrangebylex", "zrangebyscore", "zrem", "zscore",
)  # fmt: skip
"""Commands inside a Lua script are checked too. `info` tells the server's version, which start-up prints; by `hkeys` and `zrange` clients in other
languages list the actors (docs/bus.md)."""


def rule(password: str) -> str:
    """As it stands behind `user` in redis.conf, and behind `ACL SETUSER` on a server that is shared."""
    return " ".join((USER, "on", f">{password}", KEYS, "resetchannels", "-@all", *(f"+{name}" for name in COMMANDS)))
