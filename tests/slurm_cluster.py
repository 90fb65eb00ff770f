"""A real Slurm for tests: munged, slurmctld and a slurmd for each of several nodes, all processes of this host, ended by their pids."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tools.failover_bed import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scancel", "scontrol", "squeue", "sinfo")
"""Of the packages munge, slurmctld, slurmd and slurm-client."""

LIMIT_S = 60.0
"""Of one thing that the cluster does, on a machine that has other things to do."""

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
KillWait={kill_wait_s}
MinJobAge=60
JobRequeue=1
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """What of Slurm is not installed; empty where all is."""
    return ", ".join(name for name in PROGRAMS if shutil.which(name, path=_path()) is None)


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class SlurmCluster:
    """Nodes by name. Its `environment` is that of a user's shell on the cluster."""

    def __init__(self, folder: Path, nodes: Mapping[str, str], kill_wait_s: int) -> None:
        self.folder = folder
        self.nodes = tuple(nodes)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SALLOC"))}
        self.environment = {**kept, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        ports = free_ports(1 + len(nodes))
        lines = [
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2000 State=UNKNOWN {has}"
            for (name, has), port in zip(nodes.items(), ports[1:], strict=True)
        ]
        host = socket.gethostname().partition(".")[0]
        text = CONF.format(host=host, user=getpass.getuser(), folder=folder, ports=ports, kill_wait_s=kill_wait_s, nodes="\n".join(lines))
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir()

    def start(self) -> None:
        key = self.folder / "munge" / "munge.key"
        key.parent.mkdir(mode=0o700)
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        own = [f"--{what}={key.parent / what}" for what in ("pid-file", "log-file", "seed-file")]
        self._daemon("munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket", *own)
        self.wait_until(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._daemon("slurmctld", "slurmctld", "-D", "-c")
        self.until_idle()

    def until_idle(self) -> None:
        """End every job, and return once all nodes are idle, those that were killed too."""
        self.run("scancel", "--me", check=False)
        for node in self.nodes:
            if node not in self._daemons:
                self._revive(node)
        self.wait_until(lambda: set(self.states().values()) == {"idle"}, "all nodes are idle")

    def _revive(self, node: str) -> None:
        self._daemon(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str, *, noticed: bool = False) -> None:
        """The node goes away at once: its slurmd, and all that it ran. Slurm finds that out after its SlurmdTimeout, or is told."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        gone = self.processes(node)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none of them sees the end of another
            for pid in gone:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        if noticed:
            self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed")

    def processes(self, node: str = "") -> list[int]:
        """Pids of what steps and batch scripts run, with all below them and the slurmstepds above; of one node or of all."""
        parents: dict[int, int] = {}
        found: set[int] = set()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "environ").read_bytes().split(b"\0")
                mine = f"SLURM_CONF={self.folder}/slurm.conf".encode() in words
                name = next((word.partition(b"=")[2].decode() for word in words if word.startswith(b"SLURMD_NODENAME=")), "")
                if mine and (name == node if node else name):
                    found.add(int(entry.name))
        while below := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= below
        with suppress(OSError):
            holders = {parents[pid] for pid in found} - found
            found |= {pid for pid in holders if Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")}
        return sorted(found)

    def states(self) -> dict[str, str]:
        """State of each node, as sinfo has it."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %t", check=False).splitlines()
        return dict(line.split(maxsplit=1) for line in lines if " " in line)

    def steps(self) -> dict[str, str]:
        """Node of each step of a job, by the step's id; of a batch script none is one."""
        lines = self.run("squeue", "-h", "--steps", "-o", "%i %N").splitlines()
        found = dict(line.split(maxsplit=1) for line in lines if " " in line)
        return {step: node for step, node in found.items() if step.rpartition(".")[2].isdecimal()}

    def run(self, *command: object, check: bool = True) -> str:
        """What a command of the user prints."""
        done = subprocess.run(
            [*map(str, command)], env=self.environment, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=self.folder
        )
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def wait_until(self, holds, what: str, limit_s: float = LIMIT_S) -> None:
        """Slurm tells no one who asks from outside of its events."""
        end = time.monotonic() + limit_s  # noqa: TID251
        while not holds():
            assert time.monotonic() < end, f"not in {limit_s:g} s: {what}\n{self._said()}"  # noqa: TID251
            time.sleep(0.1)  # noqa: TID251

    def _said(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-600:]}" for log in sorted(self.folder.glob("*.log")))

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder, start_new_session=True
            )

    def stop(self) -> None:
        self.run("scancel", "--me", check=False)
        with suppress(AssertionError):
            self.wait_until(lambda: not self.processes(), "jobs have ended", 20.0)
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in reversed(self._daemons.values()):
            try:
                daemon.wait(10.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for entry in Path("/proc").glob("[0-9]*/cwd"):  # a slurmstepd whose controller is gone waits for it, its job ended or not
            with suppress(OSError):
                if Path(os.readlink(entry)).is_relative_to(self.folder):
                    os.kill(int(entry.parent.name), signal.SIGKILL)


@contextmanager
def slurm_cluster(nodes: Mapping[str, str], kill_wait_s: int = 10) -> Iterator[SlurmCluster]:
    """A cluster with these nodes, each with what else is said of it in slurm.conf (`Feature=h20`), for the block."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # the path of a socket must be short, and munge wants it open to all
    folder.chmod(0o755)
    cluster = SlurmCluster(folder, nodes, kill_wait_s)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)
