from runtime.host import RestartBudget


def test_delays_double_until_the_budget_is_spent_then_the_failure_escalates():
    budget = RestartBudget(limit=3, window_s=60.0, pauses_s=(0.5, 8.0))

    plans = [budget.died(now) for now in (0.0, 1.0, 2.0, 3.0)]

    assert [p.delay_s for p in plans] == [0.5, 1.0, 2.0, None]
    assert [p.attempt for p in plans] == [1, 2, 3, 4]


def test_deaths_older_than_the_window_are_forgotten():
    budget = RestartBudget(limit=1, window_s=10.0)

    first, second = budget.died(0.0), budget.died(20.0)

    assert (first.attempt, second.attempt) == (1, 1)
    assert second.delay_s == 0.5


def test_a_budget_of_zero_never_restarts():
    assert RestartBudget(limit=0, window_s=10.0).died(5.0).delay_s is None
