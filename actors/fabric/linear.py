"""Solves the planner's linear programs with SciPy's HiGHS, which the extra `fabric` installs; planning itself stays pure."""

from collections.abc import Sequence

from planning.multihop import LinearProgram


def solve(program: LinearProgram) -> Sequence[float]:
    """An optimal x. Raises ValueError where there is none, and ImportError without SciPy."""
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    def matrix(entries: tuple[tuple[int, int, float], ...], num_rows: int) -> "csr_matrix":
        rows, columns, values = zip(*entries, strict=True)
        return csr_matrix((values, (rows, columns)), shape=(num_rows, program.num_variables))

    cost = np.zeros(program.num_variables)
    cost[0] = 1.0
    found = linprog(
        cost,
        A_ub=matrix(program.bounds, program.num_bounds),
        b_ub=np.zeros(program.num_bounds),
        A_eq=matrix(program.equations, len(program.equal_to)),
        b_eq=np.array(program.equal_to),
        method="highs",
    )
    if found.x is None:
        raise ValueError(f"the linear program has no solution: {found.message}")
    return found.x.tolist()
