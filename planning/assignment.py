"""The permutation of heaviest total weight: the assignment problem, by the Hungarian method in O(n³)."""

from collections.abc import Sequence
from math import inf


def assignment(weights: Sequence[Sequence[float]]) -> list[int]:
    """For each row its column, each column once, with the largest sum of weights. Ties go the same way every time."""
    num = len(weights)
    row_price, column_price = [0.0] * (num + 1), [0.0] * (num + 1)
    row_of = [num] * (num + 1)
    """Row of each column; column `num` stands for the row that is being placed."""
    for row in range(num):
        row_of[num] = row
        previous, slack, done = [num] * (num + 1), [inf] * num, [False] * (num + 1)
        column = num
        while row_of[column] != num:
            done[column] = True
            here, nearest, step = row_of[column], num, inf
            for other in range(num):
                if done[other]:
                    continue
                reduced = -weights[here][other] - row_price[here] - column_price[other]
                if reduced < slack[other]:
                    slack[other], previous[other] = reduced, column
                if slack[other] < step:
                    step, nearest = slack[other], other
            for other in range(num + 1):
                if done[other]:
                    row_price[row_of[other]] += step
                    column_price[other] -= step
                elif other < num:
                    slack[other] -= step
            column = nearest
        while column != num:
            row_of[column] = row_of[previous[column]]
            column = previous[column]
        row_of[num] = num
    column_of = [0] * num
    for column in range(num):
        column_of[row_of[column]] = column
    return column_of
