"""How the sequences of a batch are shared out among ranks that compute side by side."""

from collections.abc import Sequence


def shares(lengths: Sequence[int], num: int) -> list[list[int]]:
    """Indices of `lengths` for each of `num` ranks, of as many tokens as possible alike: the longest left goes to the rank with the fewest.

    Every index appears once, and the same lengths give the same shares on every rank.
    """
    found: list[list[int]] = [[] for _ in range(num)]
    tokens = [0] * num
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = min(range(num), key=tokens.__getitem__)
        found[rank].append(index)
        tokens[rank] += lengths[index]
    return found
