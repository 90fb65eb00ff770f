"""Whatever steps show: α stays within its bounds, moves by one, says why, and does the same twice."""

from hypothesis import given
from hypothesis import strategies as st

from rubato.planning.adaptive_alpha import AlphaBounds, StepFigures, adapt, begin

shares = st.floats(0, 1)
figures = st.builds(
    StepFigures,
    seconds=st.floats(0, 1e4),
    samples=st.integers(0, 10_000),
    waited_s=st.floats(0, 1e4),
    rollout_idle=shares,
    spare=st.booleans(),
    age=st.floats(0, 20),
    ess=shares,
    kl=st.floats(0, 100),
)


@given(least=st.integers(0, 4), width=st.integers(0, 6), first=st.integers(0, 12), seen=st.lists(figures, max_size=120))
def test_alpha_stays_within_its_bounds_and_moves_by_one_for_a_reason(least, width, first, seen):
    bounds = AlphaBounds(least, least + width)
    state = again = begin(first, bounds)
    for step in seen:
        plan = adapt(state, step, bounds)
        again = adapt(again, step, bounds).state
        assert bounds.least <= plan.state.alpha <= bounds.most
        assert abs(plan.state.alpha - state.alpha) == (1 if plan.why else 0)
        assert plan.state == again
        state = plan.state
