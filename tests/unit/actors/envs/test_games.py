"""Games of textarena for one player, as environments."""

import random

import pytest

from rubato.actors.envs.games import TextArenaEnv
from rubato.actors.envs.hosting import check_reset, check_step

pytest.importorskip("textarena", reason="needs textarena: pip install -e '.[textarena]'")

BOUNDS = {"min_number": 1, "max_number": 8, "max_turns": 8}


def guess_all(env):
    """Rewards and observations until the game is over, by bisection."""
    low, high, found = 1, 8, []
    for _ in range(8):
        middle = (low + high) // 2
        found.append(check_step(env.step(f"I say [{middle}]")))
        if found[-1][2]:
            break
        low, high = (middle + 1, high) if "higher" in found[-1][0] else (low, middle - 1)
    return found


def test_a_game_is_played_to_its_own_reward():
    env = TextArenaEnv(id="GuessTheNumber-v0", **BOUNDS)

    opening, info = check_reset(env.reset(seed=3))
    *before, last = guess_all(env)

    assert "guess the number between 1 and 8" in opening
    assert info == {}
    assert [reward for _, reward, *_ in before] == [0.0] * len(before)
    assert last[1:4] == (1.0, True, False)
    assert "Congratulations" in last[4]["reason"]


def test_the_model_is_shown_what_is_new_and_not_what_it_wrote():
    env = TextArenaEnv(id="GuessTheNumber-v0", min_number=5, max_number=9)
    env.reset(seed=1)

    said, reward, over, _, info = env.step("mine: [5]") if env._own.game_number != 5 else env.step("mine: [6]")

    assert said.splitlines() == [f"The target number is {'higher' if env._own.game_number > 5 else 'lower'}."]
    assert (reward, over, info) == (0.0, False, {})


def test_a_move_that_the_game_does_not_take_is_an_invalid_turn_and_the_next_one_ends_it():
    env = TextArenaEnv(id="GuessTheNumber-v0", **BOUNDS)
    env.reset(seed=3)

    first, second = env.step("none"), env.step("none")

    assert "invalid move" in first[0]
    assert (first[2], first[4]) == (False, {"invalid": True})
    assert (second[2], second[4]["invalid"]) == (True, True)


@pytest.mark.parametrize("game", ["FrozenLake-v0-random", "Sudoku-v0", "Minesweeper-v0", "2048-v0", "Blackjack-v0"])
def test_the_same_seed_is_the_same_game_whatever_else_draws_meanwhile(game):
    one, other = TextArenaEnv(id=game), TextArenaEnv(id=game)
    moves = ["[up]", "[Up]", "[Hit]", "[0 0]", "[1 1]"]

    first = [one.reset(seed=11)]
    first += [one.step(moves[0]), one.step(moves[1])]
    again = [other.reset(seed=11)]
    one.reset(seed=12)
    random.random()
    again.append(other.step(moves[0]))
    one.step(moves[0])
    again.append(other.step(moves[1]))

    assert first == again


def test_a_game_leaves_the_generator_of_its_process_as_it_was():
    random.seed(1)
    expected = random.random()
    random.seed(1)

    TextArenaEnv(id="FrozenLake-v0-random").reset(seed=5)

    assert random.random() == expected


def test_a_game_for_two_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match="textarena's TicTacToe-v0 is no game for one player"):
        TextArenaEnv(id="TicTacToe-v0").reset(seed=1)
