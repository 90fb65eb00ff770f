"""Copies of checkpoints in a mirror: whole or not there, of the latest trainer alone, and read back as they were."""

import gc
import json
import socket
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import fsspec
import msgspec
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from rubato.actors.checkpoints import checkpoint, mirror, mirror_launch
from rubato.actors.checkpoints.mirror import COMPLETE, Claim, Copy, GivenUp, Gone, Mirror, MirrorError, Superseded
from rubato.runtime.errors import ConfigError

FIRST, SECOND = Claim(1, "aaaaaaaa"), Claim(2, "00000000")


def saved(run: Path, step: int, files=None) -> Path:
    folder = run / "checkpoints" / f"step_{step}"
    checkpoint.write(folder, files or {"model.safetensors": b"w" * 1000, "optimizer/state": bytes([step])}, step=step, term=1)
    return folder


def copied(at: Mirror, run: Path, step: int, claim=FIRST) -> Copy:
    copy = Copy(claim, step)
    at.put(copy, saved(run, step), "line", [run / "metrics.jsonl"])
    return copy


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    return tmp_path / "run"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


def test_what_was_copied_comes_back_as_it_was_with_the_rows_of_its_steps(run, place, tmp_path):
    copied(Mirror(str(place)), run, 3)
    (tmp_path / "new").mkdir()

    found = mirror.bring(str(place), tmp_path / "new")

    assert (found.step, found.passed_over) == (3, [])
    assert checkpoint.newest(tmp_path / "new" / "checkpoints") == (tmp_path / "new" / "checkpoints" / "step_3", [])
    assert (tmp_path / "new" / "checkpoints" / "step_3" / "optimizer" / "state").read_bytes() == b"\3"
    assert (tmp_path / "new" / "metrics.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("torn", ["complete.json", "manifest.json", "model.safetensors"])
def test_a_torn_copy_is_passed_over_for_the_one_before(run, place, tmp_path, torn):
    at = Mirror(str(place))
    copied(at, run, 3)
    broken = place / copied(at, run, 4).name / torn
    if torn == COMPLETE:
        broken.unlink()
    else:
        broken.write_bytes(broken.read_bytes()[:-1])
    (tmp_path / "new").mkdir()

    found = mirror.bring(str(place), tmp_path / "new")

    assert found.step == 3
    assert len(found.passed_over) == 1
    assert "step_4" in found.passed_over[0]


def test_an_upload_that_breaks_off_leaves_no_whole_copy(run, place):
    at = Mirror(str(place))
    copied(at, run, 3)

    def breaks():
        raise MirrorError("cut")

    at.moved = breaks
    with pytest.raises(MirrorError, match="cut"):
        copied(at, run, 4)

    assert [copy.step for copy in at.copies()] == [3, 4]
    assert [copy.step for copy in at.copies() if at.complete(copy)] == [3]
    assert mirror.look(str(place)).step == 3


class Upload(AbstractBufferedFile):
    """Parts, which become an object once it is closed."""

    def _initiate_upload(self):
        self.parts = self.fs.under_way[self.path] = []

    def _upload_chunk(self, final=False):
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.objects[self.path] = b"".join(self.fs.under_way.pop(self.path))

    def discard(self):
        self.fs.under_way.pop(self.path, None)


class Bucket(AbstractFileSystem):
    """An object store."""

    protocol = "bucket"

    def __init__(self, **options):
        super().__init__(**options)
        self.objects, self.under_way = {}, {}

    def _open(self, path, mode="rb", block_size=None, autocommit=True, cache_options=None, **kwargs):
        return Upload(self, path, mode, block_size=4 << 20)


def breaking_off(error: Exception):
    """What is called as bytes went through, and raises for the second time."""
    went = iter([None])

    def moved():
        if next(went, error):
            raise error

    return moved


@pytest.mark.parametrize(("error", "left"), [(MirrorError("cut"), 0), (GivenUp("stalled"), 1)])
def test_of_a_file_that_broke_off_a_bucket_has_no_object(run, error, left):
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    at = Mirror("bucket://mine/run", breaking_off(error))
    folder = saved(run, 3, {"model.safetensors": b"w" * (9 << 20)})

    with pytest.raises(type(error)):
        at.put(Copy(FIRST, 3), folder, "line")
    gc.collect()

    assert at._fs.objects == {}
    assert len(at._fs.under_way) == left  # another try may have begun, and sends to the same name


@pytest.mark.parametrize(("error", "left"), [(MirrorError("cut"), []), (GivenUp("stalled"), ["model.safetensors"])])
def test_of_a_file_that_broke_off_a_folder_has_nothing_unless_another_try_may_write_it(run, place, error, left):
    at = Mirror(str(place), breaking_off(error))
    folder = saved(run, 3, {"model.safetensors": b"w" * (9 << 20)})

    with pytest.raises(type(error)):
        at.put(Copy(FIRST, 3), folder, "line")

    assert [path.name for path in (place / Copy(FIRST, 3).name).iterdir()] == left


def test_a_trainer_that_was_replaced_completes_no_copy(run, place):
    old, new = Mirror(str(place)), Mirror(str(place))
    old.claim(FIRST)
    new.claim(SECOND)

    with pytest.raises(Superseded, match="a trainer of term 2 took over"):
        copied(old, run, 9)

    assert old.complete(Copy(FIRST, 9)) is None
    with pytest.raises(Superseded):
        old.claim(FIRST)
    assert new.claims() == [SECOND]


def test_of_copies_that_of_the_latest_trainer_is_gone_on_from_however_far_another_came(run, place, tmp_path):
    at = Mirror(str(place))
    copied(at, run, 9, FIRST)
    copied(at, run, 4, SECOND)
    (tmp_path / "new").mkdir()

    assert mirror.bring(str(place), tmp_path / "new").step == 4


def test_a_run_that_is_brought_back_begins_above_every_trainer_that_claimed_the_mirror(run, place, tmp_path):
    at = Mirror(str(place))
    copied(at, run, 3)
    at.claim(Claim(7, "ffffffff"))
    (tmp_path / "new").mkdir()

    mirror.bring(str(place), tmp_path / "new")

    assert checkpoint.newest_term(tmp_path / "new" / "checkpoints") == 8
    assert at.claims() == [Claim(7, "ffffffff")]  # its launch may still be refused
    at.claim(Claim(9, "00000000"))  # as its trainer does
    with pytest.raises(Superseded):
        at.hold(Claim(7, "ffffffff"))


def test_a_damaged_checkpoint_is_not_copied(run, place):
    folder = saved(run, 3)
    (folder / "model.safetensors").write_bytes(b"x" * 1000)

    with pytest.raises(MirrorError, match="differs from its manifest"):
        Mirror(str(place)).put(Copy(FIRST, 3), folder, "line")
    with pytest.raises(Gone):
        Mirror(str(place)).put(Copy(FIRST, 4), run / "checkpoints" / "step_4", "line")


def test_a_copy_whose_names_lead_elsewhere_is_refused(run, place, tmp_path):
    at = Mirror(str(place))
    copy = copied(at, run, 3)
    told = msgspec.json.decode((place / copy.name / COMPLETE).read_bytes())
    told["files"]["../../outside"] = [1, "00"]
    (place / copy.name / COMPLETE).write_bytes(json.dumps(told).encode())
    (tmp_path / "new").mkdir()

    with pytest.raises(MirrorError, match="is no file of a checkpoint"):
        mirror.bring(str(place), tmp_path / "new")


@pytest.mark.parametrize("name", ["code/evil.py", "run.json", ".lock"])
def test_a_copy_brings_beside_its_checkpoint_no_file_but_rows(run, place, tmp_path, name):
    at = Mirror(str(place))
    copy = copied(at, run, 3)
    told = msgspec.json.decode((place / copy.name / COMPLETE).read_bytes())
    told["beside"][name] = [0, blake2b(digest_size=32).hexdigest()]
    (place / copy.name / COMPLETE).write_bytes(json.dumps(told).encode())
    (tmp_path / "new").mkdir()

    with pytest.raises(MirrorError, match=r"is altered: its complete\.json has"):
        mirror.bring(str(place), tmp_path / "new")

    assert list((tmp_path / "new").iterdir()) == []


def test_an_empty_mirror_has_nothing_to_go_on_from(place, tmp_path):
    with pytest.raises(MirrorError, match="holds no checkpoint to go on from"):
        mirror.bring(str(place), tmp_path)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("copies/run", "neither a whole path nor a URL"),
        ("s3://:hunter2@[x/y", "checkpoint.mirror=s3://… is no URL: "),
        ("file://:hunter2@[x", "checkpoint.mirror=file://… is no URL: "),
        ("foo://bucket/run", "there is no foo://"),
        ("memory://run", "is the memory of the process that writes there"),
        ("file://", "is no whole path"),
        ("file://tmp/run", "is no whole path"),
        ("adl://user:hunter2@store/run", "adl:// needs"),
    ],
)
def test_a_wrong_url_is_one_sentence_without_its_password(url, said):
    with pytest.raises(ConfigError, match=said) as told:
        mirror.check_url(url)

    assert "hunter2" not in str(told.value)
    assert "\n" not in str(told.value)


def test_a_folder_whose_parent_is_missing_is_refused(tmp_path):
    with pytest.raises(MirrorError, match=f"there is no {tmp_path}/nowhere"):
        mirror.look(f"{tmp_path}/nowhere/mirror")


def test_secrets_of_a_url_are_in_no_sentence(tmp_path):
    url = "ftp://me:hunter2@127.0.0.1:9/run?token=sesame"

    with pytest.raises(MirrorError) as told:
        mirror.look(url)

    assert "127.0.0.1" in str(told.value)
    assert "hunter2" not in str(told.value)
    assert "sesame" not in str(told.value)


def test_a_mirror_within_the_run_folder_is_refused(tmp_path):
    for url in (tmp_path / "run", tmp_path / "run" / "checkpoints", f"file://{tmp_path}/run/copies"):
        config = SimpleNamespace(checkpoint=SimpleNamespace(mirror=str(url)))
        with pytest.raises(ConfigError, match="lies in the run's own folder, and goes with its disk"):
            mirror_launch.preflight(config, tmp_path / "run")


def test_a_run_comes_back_under_its_own_seed_alone(run, place, tmp_path):
    Mirror(str(place)).put(Copy(FIRST, 3), saved(run, 3), "line", seed=7)
    other, own = (SimpleNamespace(run=SimpleNamespace(seed=seed), checkpoint=SimpleNamespace(mirror=str(place))) for seed in (9, 7))
    for name in ("other", "own"):
        (tmp_path / name).mkdir()

    with pytest.raises(ConfigError, match=r"run.seed is 9, and the run whose checkpoints .* holds has 7"):
        mirror_launch.bring_back(other, tmp_path / "other")

    assert "going on after step 3" in mirror_launch.bring_back(own, tmp_path / "own")


LAUNCH = """
import sys
from pathlib import Path
from types import SimpleNamespace
from rubato.actors.checkpoints import mirror_launch
mirror_launch.preflight(SimpleNamespace(checkpoint=SimpleNamespace(mirror=sys.argv[1])), Path(sys.argv[2]))
"""


def test_what_asks_a_silent_mirror_ends_with_the_launch_that_is_killed(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        url = f"ftp://127.0.0.1:{server.getsockname()[1]}/run"
        with subprocess.Popen([sys.executable, "-c", LAUNCH, url, str(tmp_path)]) as launch:
            asking, _ = server.accept()
            launch.kill()
        with asking:
            asking.settimeout(15)
            said = asking.recv(1)

    assert said == b""  # its end of the connection is closed
