"""What configs/deploy says fits Rubato: its commands, its config, its ports, and the time that it gives a drain."""

import io
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from rubato.runtime import cli
from rubato.runtime.config.compose import load, part_named, problems
from rubato.runtime.launch.agent import GUESTS_S
from rubato.runtime.launch.endpoint import TOKEN
from rubato.runtime.launch.hosts import DRAIN_LIMIT_S, TELL_S

DEPLOY = Path(__file__).parents[2] / "configs/deploy"
FOLDER = DEPLOY / "kubernetes"
KINDS = {"head.yaml": "StatefulSet", "engines.yaml": "Deployment", "environments.yaml": "Deployment"}
HOSTS = [name for name in KINDS if name != "head.yaml"]

RECORDER = """#!/bin/sh
printf '%s\\n' "$@" >>"$CALLS"
echo >>"$CALLS"
test "$1" != keys || : >run/keys.json
test "$1" != add || cat >"$CALLS.stdin"
"""


def manifests(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pod(name):
    (workload,) = manifests(name)
    assert workload["kind"] == KINDS[name]
    return workload["spec"]["template"]["spec"]


def container(name):
    (found,) = pod(name)["containers"]
    return found


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The config that the first host is given, as its command changes it."""
    monkeypatch.setenv(TOKEN, "secret")
    file = tmp_path / "job.yaml"
    file.write_text(manifests("job.yaml")[0]["data"]["job.yaml"])
    return load(file, ["bus.host=10.0.0.5"])


def called(name, folder, *, before=()):
    """What the container's command calls `rubato` with, each a list of words, in a folder of its own that holds `before`."""
    (folder / "bin").mkdir(exist_ok=True)
    for stub, text in (("rubato", RECORDER), ("sleep", "#!/bin/sh\n")):
        (folder / "bin" / stub).write_text(text)
        (folder / "bin" / stub).chmod(0o755)
    (folder / "run").mkdir(exist_ok=True)
    for made in before:
        (folder / made).touch()
    (folder / "join-token").write_text("rubato1.secret\n")
    calls = folder / "calls"
    calls.write_text("")
    words = [word.replace("/etc/rubato/join-token", str(folder / "join-token")) for word in container(name)["args"]]
    given = {each["name"]: each.get("value", "10.0.0.5") for each in container(name)["env"]}
    given |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls)}
    subprocess.run(words, cwd=folder, env=given, check=True, timeout=60)
    return [call.split("\n") for call in calls.read_text().removesuffix("\n\n").split("\n\n") if call]


def test_the_first_host_makes_its_keys_and_launches_goes_on_after_a_restart_and_rests_at_the_end(tmp_path):
    folder = tmp_path
    began = called("head.yaml", folder)
    (folder / "done").unlink()
    again = called("head.yaml", folder, before=["run/config.yaml"])
    rests = called("head.yaml", folder)

    assert began == [["keys", "new", "--run", "run"], ["launch", "/etc/rubato/job.yaml", "bus.host=10.0.0.5", "--run-dir", "run"]]
    assert again == [["launch", "--resume", "run", "bus.host=10.0.0.5"]]
    assert rests == []


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_brings_pools_of_the_job_with_a_token_that_stands_on_no_command_line(name, tmp_path, job):
    (words,) = called(name, tmp_path)

    assert words[:2] == ["add", "host.listen=0.0.0.0:9109"]
    assert words[words.index("--host") + 1] == "10.0.0.5"
    assert words[words.index("--join") + 1] == "-"
    assert (tmp_path / "calls.stdin").read_text() == "rubato1.secret\n"
    for brought in words[words.index("--pools") + 1].split(","):
        part = part_named(job, brought.partition("=")[0])
        assert job.actors[part.role].count == 0


@pytest.mark.parametrize("name", KINDS)
def test_the_commands_are_ones_that_our_command_line_takes(name, tmp_path, capsys, monkeypatch, job):
    monkeypatch.chdir(tmp_path)
    for words in called(name, tmp_path):
        told = [word.replace("/etc/rubato/job.yaml", str(tmp_path / "job.yaml")) for word in words]
        if told[0] == "keys":
            (tmp_path / "run/keys.json").unlink()
        monkeypatch.setattr("sys.stdin", io.StringIO((tmp_path / "join-token").read_text()))
        code = cli.main([*told, *(["--dry-run"] if told[0] == "launch" else [])])
        said = capsys.readouterr().err
        assert (code, said) == (0, "") or (told[0] == "add" and said.startswith("this is no join token"))


def test_the_job_has_all_that_it_names_and_says_where_its_hosts_meet(job, tmp_path):
    assert problems(job, tmp_path) == []

    ports = {port["name"]: port["containerPort"] for port in container("head.yaml")["ports"]}
    assert ports == {"gate": job.bus.port, "metrics": int(job.host.listen.rpartition(":")[2])}
    services = [each for each in manifests("network.yaml") if each["kind"] == "Service"]
    assert {port["name"]: port["port"] for service in services for port in service["spec"]["ports"]} == ports
    (policy,) = (each["spec"] for each in manifests("network.yaml") if each["kind"] == "NetworkPolicy")
    first, last = map(int, job.bus.ports.split("-"))
    meet = [{"protocol": "TCP", "port": job.bus.port}, {"protocol": "TCP", "port": first, "endPort": last}]
    assert policy["ingress"][0]["ports"] == policy["egress"][0]["ports"] == meet
    assert policy["ingress"][1]["ports"] == [{"protocol": "TCP", "port": ports["metrics"]}]


def test_the_first_host_has_the_time_that_its_stop_may_take(job):
    """Hosts that joined are told and awaited, those on which others depend after these; then its actors, one order after another."""
    orders = {job.actor_class(role).drain_order for role in job.actors if job.members(role)}
    hosts_s = DRAIN_LIMIT_S + TELL_S
    limit_s = 2 * hosts_s + 2 * len(orders) * DRAIN_LIMIT_S + GUESTS_S

    assert pod("head.yaml")["terminationGracePeriodSeconds"] > limit_s


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_that_joined_has_the_time_that_its_drain_may_take(name, job):
    pools = next(each["value"] for each in container(name)["env"] if each["name"] == "POOLS")
    orders = {job.actor_class(part_named(job, pool.partition("=")[0]).role).drain_order for pool in pools.split(",")}

    assert pod(name)["terminationGracePeriodSeconds"] > TELL_S + len(orders) * DRAIN_LIMIT_S + GUESTS_S


@pytest.mark.parametrize("name", KINDS)
def test_no_pod_has_a_right_that_it_does_not_need(name):
    user = re.findall(r"^USER (\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    rights, own = pod(name)["securityContext"], container(name)["securityContext"]

    assert rights["runAsNonRoot"]
    assert {str(rights["runAsUser"])} == set(user)
    assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert pod(name)["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", KINDS)
def test_probes_ask_the_node_agent_with_a_token_from_the_secret(name):
    asked = {probe: container(name)[probe]["exec"]["command"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    (token,) = (each["valueFrom"]["secretKeyRef"] for each in container(name)["env"] if each["name"] == TOKEN)

    assert asked == {
        "startupProbe": ["rubato-probe", "live"], "livenessProbe": ["rubato-probe", "live"], "readinessProbe": ["rubato-probe", "ready"]
    }  # fmt: skip
    assert token == {"name": "rubato", "key": "host-token"}


def test_no_file_holds_a_secret_and_every_file_is_applied():
    (secret,) = manifests("secret.yaml")
    (listed,) = manifests("kustomization.yaml")

    assert not {"data", "stringData"} & secret.keys()
    assert sorted(listed["resources"]) == sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")


def test_on_gpus_the_image_is_found_by_the_name_that_it_has_by_then():
    """Kustomize passes over an image of another name in silence."""
    base, gpu = (yaml.safe_load((DEPLOY / kind / "kustomization.yaml").read_text())["images"] for kind in ("kubernetes", "kubernetes-gpu"))

    assert [image["name"] for image in gpu] == [image["newName"] for image in base]
    assert not any("newName" in image for image in gpu)


def test_an_image_is_built_for_each_kind_of_machine_from_what_the_package_is_made_of():
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    targets = {line.rpartition(" AS ")[2] for line in lines if line.startswith("FROM")}
    tags = {
        image["newTag"] for path in DEPLOY.glob("kubernetes*/kustomization.yaml") for image in yaml.safe_load(path.read_text())["images"]
    }
    seen = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}

    assert tags == {"cpu", "cuda"} <= targets
    assert all((DEPLOY.parents[1] / name).exists() for name in seen)
    assert {
        "bus",
        "runtime",
        "planning",
        "actors",
        "sim",
        "rubato",
        "configs",
        "examples",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    } <= seen


@pytest.mark.parametrize("path", [path for path in DEPLOY.glob("*Dockerfile") if "COPY . " in path.read_text()], ids=lambda path: path.name)
def test_a_build_that_copies_the_checkout_sees_only_what_is_named(path):
    """A checkout may hold runs with their keys, and a build goes by the ignore file of its own name alone."""
    ignored = path.with_name(f"{path.name}.dockerignore")

    rules = [line for line in ignored.read_text().splitlines() if not line.startswith("#")] if ignored.exists() else []

    assert rules[:1] == ["*"]
    assert not [rule for rule in rules if rule.startswith(("!.", "!runs"))]
