"""The command: what it writes, what it prints last, and how it refuses bad input."""

import json
from pathlib import Path

import pytest

from runtime.cli import main
from sim.scenario import load

SCENARIOS = sorted((Path(__file__).parents[2] / "configs" / "sim").glob("*.yaml"))
COST = Path(__file__).parents[2] / "configs" / "sim" / "rfabric_cost.yaml"
SMALL = [str(COST), "gpus=[1024, 4096]", "radices=[64]", "sip_gpus=1024"]
THROUGHPUT = COST.with_name("rfabric_throughput.yaml")


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_loads(path):
    loaded = load(path)

    assert loaded.scenario.claims


def test_a_run_writes_its_folder_and_sums_up_in_its_last_line(tmp_path, capsys):
    code = main(["sim", *SMALL, "--out", str(tmp_path / "run")])

    said = capsys.readouterr().out.splitlines()
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert code == 0
    assert run["simulated"] is True
    assert said[-1].startswith("simulated: ")
    assert f"of {len(run['claims'])} claims hold" in said[-1]
    assert {"name", "paper", "ours", "tolerance", "holds", "expected", "reason"} <= set(run["claims"][0])
    assert (tmp_path / "run" / "cost.csv").read_text().splitlines()[1].startswith("64,1024,fat-tree,2,3072,")
    assert (tmp_path / "run" / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert "traceEvents" in json.loads((tmp_path / "run" / "trace.json").read_text())


def test_the_same_scenario_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        main(["sim", *SMALL, "--no-plots", "--out", str(tmp_path / name)])

    for first in sorted((tmp_path / "a").iterdir()):
        assert first.read_bytes() == (tmp_path / "b" / first.name).read_bytes()


def test_the_throughput_scenario_is_the_same_twice_and_holds_what_it_claims(tmp_path, capsys):
    few = [
        "gpus=[2048]",
        "sensitivity=[]",
        "fabrics=[fat-tree, rail-optimised, oversubscribed, sip, rfabric]",
        "--no-plots",
    ]

    codes = [main(["sim", str(THROUGHPUT), *few, "--out", str(tmp_path / name)]) for name in "ab"]

    assert codes == [0, 0]
    assert capsys.readouterr().out.splitlines()[-1] == "simulated: 4 of 5 claims hold; 1 expected to fail: sip_2048"
    for first in sorted((tmp_path / "a").iterdir()):
        assert first.read_bytes() == (tmp_path / "b" / first.name).read_bytes()


def test_an_outcome_against_the_expectation_exits_with_3(tmp_path, capsys):
    code = main(["sim", *SMALL, "prices.ocs_port=2000", "--no-plots", "--out", str(tmp_path / "run")])

    assert code == 3
    assert "against the expectation" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none.yaml"], "none.yaml does not exist. Give the path of a YAML file, e.g. configs/quickstart.yaml."),
        (
            [str(COST), "fabric.core_shar=1"],
            "command line: fabric.core_shar is not a key. Did you mean fabric.core_share?",
        ),
        ([str(COST), "kind=cost"], "command line: kind must be one of "),
        ([str(COST), "gpu=none.yaml"], "none.yaml does not exist."),
        ([str(THROUGHPUT), "gpus=[64]"], "can't be simulated: 64 GPUs leave no room to train"),
        ([str(THROUGHPUT), "fabrics=[foo]"], "fabrics: foo is no fabric; there are fat-tree"),
        (
            [str(THROUGHPUT), "gpus=[64000000]"],
            "command line: gpus: give at least one cluster, each a multiple of 8 GPUs",
        ),
        ([str(COST), "prices.eps_port=-1"], "command line: prices.eps_port is -1; it must be "),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, tmp_path, capsys):
    code = main(["sim", *arguments, "--out", str(tmp_path / "run")])

    said = capsys.readouterr().err.strip()
    assert code == 2
    assert sentence in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_run_is_kept(tmp_path, capsys):
    main(["sim", *SMALL, "--no-plots", "--out", str(tmp_path)])

    assert main(["sim", *SMALL, "--no-plots", "--out", str(tmp_path)]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_a_file_that_includes_itself_is_refused(tmp_path, capsys):
    (tmp_path / "loop.yaml").write_text("kind: rfabric_cost\ngpu: loop.yaml\n")

    assert main(["sim", str(tmp_path / "loop.yaml"), "--out", str(tmp_path / "run")]) == 2
    assert "includes itself" in capsys.readouterr().err
