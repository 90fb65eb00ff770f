"""The lake as text: maps, splits, moves."""

import gc
import random
import tracemalloc

import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from rubato.actors.envs.frozen_lake import ACTIONS, FrozenLakeText, draw_map, split_of

MAPS = [draw_map(seed, size=4, p=0.8, split="train") for seed in range(300)]
HELD_OUT = [draw_map(seed, size=4, p=0.8, split="eval") for seed in range(300)]


def walk_to(lake, goal_words):
    return [lake.step(word) for word in goal_words]


def solve(rows):
    """Words of a shortest path."""
    moves = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    paths, frontier = {(0, 0): []}, [(0, 0)]
    while frontier:
        at = frontier.pop(0)
        for word, (down, right) in moves.items():
            to = (at[0] + down, at[1] + right)
            if to in paths or not (0 <= to[0] < 4 and 0 <= to[1] < 4) or rows[to[0]][to[1]] == "H":
                continue
            paths[to] = [*paths[at], word]
            frontier.append(to)
    return paths[(3, 3)]


def test_no_map_is_in_both_splits_and_about_one_in_five_is_held_out():
    assert not set(MAPS) & set(HELD_OUT)
    assert {split_of(rows) for rows in MAPS} == {"train"}
    every = [draw_map(seed, size=4, p=0.8, split=split) for seed in range(100) for split in ("train", "eval")]
    assert len(set(every)) > 100


def test_the_same_seed_gives_the_same_map_on_any_instance():
    first, second = FrozenLakeText(), FrozenLakeText()

    views = [first.reset(seed=7)[0], first.reset(seed=8)[0], second.reset(seed=7)[0]]

    assert views[0] == views[2] != views[1]


@pytest.mark.parametrize("seed", range(20))
def test_every_map_has_a_path_that_earns_the_reward_at_its_end_only(seed):
    lake = FrozenLakeText()
    view, info = lake.reset(seed=seed)
    rows = draw_map(seed, size=4, p=0.8, split="train")

    steps = walk_to(lake, solve(rows))

    assert view == "\n".join(rows).replace("S", "P", 1)
    assert info == {}
    assert [step[1] for step in steps] == [0.0] * (len(steps) - 1) + [1.0]
    assert [step[2] for step in steps] == [False] * (len(steps) - 1) + [True]


def test_the_player_is_marked_where_it_stands_and_the_start_is_plain_ice_afterwards():
    lake = FrozenLakeText()
    rows = draw_map(3, size=4, p=0.8, split="train")
    lake.reset(seed=3)
    word = solve(rows)[0]

    view, *_ = lake.step(f"I go {word.upper()}!")

    assert view.count("P") == 1
    assert view[0] == "F"


def test_text_without_a_direction_is_no_move():
    lake = FrozenLakeText()
    view, _ = lake.reset(seed=1)

    after, reward, terminated, truncated, info = lake.step("perhaps?")

    assert (after, reward, terminated, truncated) == (view, 0.0, False, False)
    assert info == {"invalid": True}


def test_the_first_direction_counts():
    lake = FrozenLakeText()
    view, _ = lake.reset(seed=1)

    assert lake.step("up, then down")[0] == view


def test_episodes_on_the_same_map_do_not_touch_each_other():
    one, other = FrozenLakeText(), FrozenLakeText()
    start, _ = one.reset(seed=5)
    other.reset(seed=5)

    one.step(solve(draw_map(5, size=4, p=0.8, split="train"))[0])

    assert other.step("nothing")[0] == start


def test_arguments_that_make_no_lake_are_refused():
    for wrong in ({"size": 1}, {"p": 0.0}, {"split": "test"}):
        with pytest.raises(ValueError, match="FrozenLakeText needs"):
            FrozenLakeText(**wrong)


def test_moves_rewards_and_ends_are_gymnasiums():
    lake, chance = FrozenLakeText(), random.Random(1)
    for seed in range(20):
        rows = draw_map(seed, size=4, p=0.8, split="train")
        twin = FrozenLakeEnv(desc=list(rows), is_slippery=False)
        twin.reset(seed=seed)
        lake.reset(seed=seed)
        ended = False
        while not ended:
            word = chance.choice(list(ACTIONS))
            view, reward, ended, truncated, _ = lake.step(word)
            state, expected, over, _, _ = twin.step(ACTIONS[word])
            assert (reward, ended, truncated) == (expected, over, False)
            assert view.replace("\n", "").index("P") == state


def test_maps_that_are_kept_ready_take_no_more_memory_however_many_were_played():
    lake, used = FrozenLakeText(), list[int]()
    tracemalloc.start()
    for seed in range(6 * 256):
        lake.reset(seed=seed)
        if (seed + 1) % (2 * 256) == 0:
            gc.collect()  # gymnasium's own environment refers to itself
            used.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()

    assert used[0] < 256 * 6000
    assert used[2] < 1.1 * used[0]
