"""What a party keeps is its own account's alone: another account of the same machine can read nothing of it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from medsilo.algorithms.datasets import ImageDataset
from tests.support.runs.federation import Federation

NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder to which everybody has the way, unlike pytest's; and processes that make files for everybody."""
    folder = Path(tempfile.mkdtemp(prefix="medsilo-open-"))
    folder.chmod(0o755)
    before = os.umask(0)
    yield folder
    os.umask(before)
    shutil.rmtree(folder)


@pytest.fixture
def one(open_folder: Path, shards: list[ImageDataset]) -> Iterator[Federation]:
    made = Federation(open_folder, shards[:1], run={"rounds": 1}, forked=False)
    made.write_silo("hospital1", keep_sent_days=1)
    yield made
    made.kill_everything()


def states(one: Federation) -> list[Path]:
    return [one.folder / "state" / party for party in ("coordinator", *one.silos)]


def wide(*folders: Path) -> list[str]:
    """What others have a right to."""
    found = []
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode) and mode & 0o077:
                found.append(f"{path.relative_to(folder.parent)} {stat.S_IMODE(mode):o}")
    return found


def in_another_account(look: Callable[[], object]) -> object:
    """What a look gives to another account of this machine."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another account")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writing, json.dumps(look()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = json.loads(pipe.read())
    os.waitpid(child, 0)
    return found


def readable(paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        try:
            if path.is_dir():
                list(path.iterdir())
            else:
                path.open("rb").close()
        except OSError:
            continue
        found.append(path.name)
    return found


def make_wide(folder: Path) -> None:
    """As an earlier release's daemon left it, and worse."""
    for path in (folder, *folder.rglob("*")):
        if not path.name.endswith((".key", "page.token")):
            path.chmod(0o777 if path.is_dir() else 0o666)


def test_after_a_run_with_an_open_umask_no_other_account_can_read_anything_that_the_daemons_wrote(
    one: Federation,
) -> None:
    one.run_to_the_end()
    hospital, coordinator = ["--config", "hospital1.yaml"], ["--config", "coordinator.yaml"]
    one.command("silo", "report", *hospital)
    one.command("silo", "audit", "export", *hospital)
    one.command("silo", "audit", "open", *hospital)
    one.command("silo", "rehearse", *hospital, "--canaries", "20")
    one.command("silo", "evaluate", *hospital)
    one.command("silo", "consent", "withdraw", *hospital, "--yes")
    one.command("coordinator", "status", *coordinator)
    one.command("coordinator", "report", *coordinator)
    one.command("coordinator", "audit", "export", *coordinator)
    assert wide(*states(one)) == []
    everything = [path for folder in states(one) for path in (folder, *folder.rglob("*"))]
    names = {path.name for path in everything}
    assert {"coordinator.db", "records.jsonl", "checkpoints.jsonl", "model.safetensors", "sent", "report"} <= names
    control = one.folder / "coordinator.yaml"
    assert in_another_account(lambda: readable([*everything, control])) == [control.name], "the eyes are open"


def test_what_the_user_names_is_made_as_the_user_has_it(one: Federation) -> None:
    one.run_to_the_end()
    one.command("silo", "report", "--config", "hospital1.yaml", "--out", "public", "--format", "html")
    one.command("silo", "audit", "export", "--config", "hospital1.yaml", "--out", "evidence.json")
    made = [*(one.folder / "public").iterdir(), one.folder / "evidence.json"]
    assert len(made) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o666}


def test_folders_that_stood_open_are_put_right_at_the_start_which_says_so_and_doctor_says_it_before(
    one: Federation,
) -> None:
    one.run_to_the_end()
    said = {party: one.said(party) for party in ("coordinator", "hospital1")}
    for folder in states(one):
        make_wide(folder)
    for command, party in (("silo", "hospital1"), ("coordinator", "coordinator")):
        told = " ".join(one.command(command, "doctor", "--config", f"{party}.yaml", expect=14).split())
        assert "can read" in told
        assert "chmod -R go=" in told
    coordinator = one.start_coordinator()
    one.wait_for("listening", lambda: "listening" in one.said("coordinator").removeprefix(said["coordinator"]))
    one.finish(one.start_silo("hospital1"), coordinator)
    for party in ("coordinator", "hospital1"):
        told = one.said(party).removeprefix(said[party])
        assert told.count("other accounts of this machine could read the folder, ") == 1, told
    assert wide(*states(one)) == []


def test_a_private_key_that_others_could_read_is_refused_and_not_made_to_look_well_kept(one: Federation) -> None:
    key = one.keys("hospital1") / "audit.key"
    key.chmod(0o644)
    assert "chmod 600" in one.command("silo", "train", "--config", "hospital1.yaml", expect=5).replace("\n", " ")
    assert stat.S_IMODE(key.stat().st_mode) == 0o644


def test_a_federation_that_init_makes_is_private_from_its_first_file(open_folder: Path) -> None:
    one = Federation.__new__(Federation)
    one.folder, one.forked, one.processes = open_folder, False, []
    one.command(
        *("coordinator", "init", "--federation", "new", "--host", "localhost", "--invite", "hospital1"),
        *("--config", "coordinator.yaml"),
    )
    one.command("coordinator", "invite", "hospital1", "--config", "coordinator.yaml")
    found = wide(open_folder / "state" / "coordinator")
    assert [name for name in found if not name.split()[0].endswith((".pem", ".csr", ".pub"))] == []
