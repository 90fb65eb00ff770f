"""Which engines share GPUs, and which of them are planned for."""

from actors.messages.generation import Modelled
from actors.messages.orchestration import EngineSeen
from actors.scheduling.fleet import servers

H800 = Modelled("h800", "qwen2.5-14b", 1)


def engine(name, modelled=H800, serves="both"):
    return EngineSeen(name, 64, True, modelled=modelled, serves=serves)


def test_engines_of_another_pool_share_no_gpus():
    found = servers([engine("a1"), engine("b1"), engine("a2")], lambda name: f"here {name[0]}")

    assert [[each.name for each in server.engines] for server in found] == [["a1", "a2"], ["b1"]]


def test_engines_that_only_prefill_or_whose_hardware_nobody_says_are_left_out():
    given = [engine("prefills", serves="prefill"), engine("decodes", serves="decode"), engine("unknown", None)]

    (server,) = servers(given, lambda name: "here pool")

    assert [each.name for each in server.engines] == ["decodes"]
