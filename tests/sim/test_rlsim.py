"""The command: what it writes, what it prints last, and how it refuses bad input."""

import json
import os
from pathlib import Path

import pytest

from rubato.runtime.cli import main
from rubato.sim.scenario import load

SCENARIOS = sorted((Path(__file__).parents[2] / "configs" / "sim").glob("*.yaml"))
COST = Path(__file__).parents[2] / "configs" / "sim" / "rfabric_cost.yaml"
SMALL = [str(COST), "gpus=[1024, 4096]", "radices=[64]", "sip_gpus=1024"]
THROUGHPUT = COST.with_name("rfabric_throughput.yaml")
SYNC = COST.with_name("modelsync.yaml")
QUICKSTART = COST.with_name("quickstart.yaml")
BED = COST.with_name("quickstart_fabric.yaml")


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
    assert f"of {len(run['claims'])} published claims hold" in said[-1]
    assert {claim["kind"] for claim in run["claims"]} == {"published"}
    assert {"name", "paper", "bar", "ours", "tolerance", "holds", "expected", "reason"} <= set(run["claims"][0])
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
        "fabrics=[fat-tree, rail-optimised, oversubscribed, sip, rfabric, rfabric-unweighted]",
        "--no-plots",
    ]

    codes = [main(["sim", str(THROUGHPUT), *few, "--out", str(tmp_path / name)]) for name in "ab"]

    assert codes == [0, 0]
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "simulated: 4 of 6 published claims hold; 2 expected to fail: sip_2048, rfabric-unweighted_2048"
    )
    for first in sorted((tmp_path / "a").iterdir()):
        assert first.read_bytes() == (tmp_path / "b" / first.name).read_bytes()


def test_an_outcome_against_the_expectation_exits_with_3(tmp_path, capsys):
    code = main(["sim", *SMALL, "prices.ocs_port=2000", "--no-plots", "--out", str(tmp_path / "run")])

    assert code == 3
    assert "against the expectation" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none.yaml"], "none.yaml does not exist. Give the path of a YAML file, or a name that rubato configs lists."),
        ([str(COST), "fabric.core_shar=1"], "command line: fabric.core_shar is not a key. Did you mean fabric.core_share?"),
        ([str(COST), "kind=cost"], "command line: kind must be one of "),
        ([str(COST), "gpu=none.yaml"], "none.yaml does not exist."),
        ([str(THROUGHPUT), "gpus=[64]"], "can't be simulated: 64 GPUs leave no room to train"),
        ([str(THROUGHPUT), "fabrics=[foo]"], "fabrics: foo is no fabric; there are fat-tree"),
        ([str(THROUGHPUT), "gpus=[64000000]"], "command line: gpus: give at least one cluster, each a multiple of 8 GPUs"),
        ([str(COST), "prices.eps_port=-1"], "command line: prices.eps_port is -1; it must be "),
        ([*SMALL, "prices.eps_port=0", "prices.transceiver=0"], "prices: transceiver, or both eps_port and ocs_port, must"),
        ([*SMALL, "core_shares=[-4.7]"], "command line: core_shares.0 is -4.7; it must be at least 0."),
        ([*SMALL, "fabric.ecmp=true", "fabric.lost=0.99"], "a leaf with 99% of its uplinks lost has none left"),
        ([*SMALL, "job.skew=1e308"], "rfabric_cost.yaml can't be simulated: a figure is beyond what can be computed ("),
        ([str(SYNC), "gpus=[0]"], "command line: gpus.0 is 0; it must be above 0."),
        ([str(SYNC), "gpus=[7]"], "gpus must be whole servers of 8."),
        ([str(SYNC), "gpus=[]"], "command line: gpus is []; it must have at least 1 item."),
        ([str(SYNC), "models={}"], "command line: models is {}; it must have at least 1 item."),
        ([str(SYNC), "tcp.seconds=1e-320", "line_bytes_s=1e308", "rdma.seconds=1e-320"], "relay_bytes_s is inf; input should"),
        (
            [str(SYNC), "claims=[{name: zzz, paper: 1, source: table 1}]"],
            "The claim zzz is about no figure of this run. Its figures: rollmux",
        ),
        (
            [str(SYNC), "claims=[{name: speedup_8, paper: true, tolerance: at least, source: table 1}]"],
            "claim speedup_8 can't be judged: paper",
        ),
        ([str(SYNC), "claims=[{name: speedup_8, paper: 1, tolerance: factor 0, source: table 1}]"], "claims.0: tolerance must be such as"),
        ([str(SYNC), "claims=[{name: speedup_8, paper: 1}]"], "claims.0: a published claim needs paper"),
        ([str(SYNC), "claims=[{name: speedup_8, kind: ours, paper: 1}]"], "claims.0: a claim of kind ours needs its"),
        ([str(SYNC), "claims=[3]"], "command line: claims.0 is 3; it must be a section of key: value pairs."),
        ([str(QUICKSTART), "job.nokey=1"], "job: nokey is not a key."),
        ([str(QUICKSTART), "job.train.nokey=1"], "job: train.nokey is not a key."),
        ([str(QUICKSTART), "job=../sim/modelsync.yaml"], "command line: job: names no actors. Add a section actors with"),
        ([str(BED), "job.nosection.nokey=1"], "job: nosection is not a key: no role under actors reads it. Is one missing there?"),
        ([str(BED), "job.fabric.nokey=1"], "job: fabric.nokey is not a key."),
        ([str(BED), "job.fabric.racks={}"], "can't be simulated: testbed needs racks: two or more, each with"),
        ([str(BED), "job.fabric.racks={a: [], b: []}"], "testbed needs racks: two or more, each with the address of its"),
        ([str(BED), "job.fabric="], "can't be simulated: testbed needs racks: two or more, each with"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, tmp_path, capsys):
    code = main(["sim", *arguments, "--out", str(tmp_path / "run")])

    said = capsys.readouterr().err.strip()
    assert code == 2
    assert sentence in said
    assert len(said.splitlines()) == 1
    assert "pydantic" not in said
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_run_is_kept(tmp_path, capsys):
    main(["sim", *SMALL, "--no-plots", "--out", str(tmp_path)])

    assert main(["sim", *SMALL, "--no-plots", "--out", str(tmp_path)]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_force_removes_the_files_of_the_earlier_run_and_no_others(tmp_path):
    main(["sim", str(COST.with_name("rfabric_characterisation.yaml")), "--out", str(tmp_path)])
    assert sorted(os.listdir(tmp_path)) == ["run.json", "trace.json", "windows.csv", "windows.png"]
    (tmp_path / "notes.csv").write_text("mine")

    assert main(["sim", str(SYNC), "--no-plots", "--force", "--out", str(tmp_path)]) == 0

    assert sorted(os.listdir(tmp_path)) == ["notes.csv", "phases.csv", "run.json", "trace.json"]


def test_force_keeps_a_run_that_is_refused(tmp_path, capsys):
    main(["sim", str(SYNC), "--no-plots", "--out", str(tmp_path)])
    before = sorted(os.listdir(tmp_path))

    assert main(["sim", str(SYNC), "claims=[{name: zzz, paper: 1, source: table 1}]", "--force", "--out", str(tmp_path)]) == 2

    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("text", ['{"run_id": "live"}', "[]", "{"])
def test_force_does_not_replace_what_no_simulation_wrote(text, tmp_path, capsys):
    (tmp_path / "run.json").write_text(text)

    assert main(["sim", str(SYNC), "--force", "--out", str(tmp_path)]) == 2

    assert "holds a run.json that is no simulation's" in capsys.readouterr().err
    assert (tmp_path / "run.json").read_text() == text


def test_a_place_that_can_not_be_written_is_found_before_the_simulation(tmp_path, capsys, monkeypatch):
    def simulated(*_):
        raise AssertionError("simulated first")

    monkeypatch.setattr("rubato.sim.rlsim._simulated", simulated)
    (tmp_path / "file").write_text("")

    for place in (tmp_path / "file" / "run", "/proc/self/run"):
        assert main(["sim", str(SYNC), "--out", str(place)]) == 2
        assert f"{place} can't be written: " in capsys.readouterr().err


def test_a_file_that_includes_itself_is_refused(tmp_path, capsys):
    (tmp_path / "loop.yaml").write_text("kind: rfabric_cost\ngpu: loop.yaml\n")

    assert main(["sim", str(tmp_path / "loop.yaml"), "--out", str(tmp_path / "run")]) == 2
    assert "includes itself" in capsys.readouterr().err
