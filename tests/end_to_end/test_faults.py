"""The faults are what they claim to be: a test of the tests' own tool."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.runs.faults import Fault, happened, library, needs_faults

BEGIN = """
import ctypes, os, sys, datetime
state, log, *faults = sys.argv[1:]
sys.path.insert(0, {here!r})
from tests.support.runs.faults import KINDS, PLACES, Fault
shim = ctypes.CDLL(None)
text, whole = ctypes.c_char_p, ctypes.c_int
shim.fault_add.argtypes = [text, whole, whole, ctypes.c_long, whole, ctypes.c_double, text]
for fault in map(Fault.read, faults):
    kind, place = KINDS.index(fault.kind), PLACES.index(fault.place)
    shim.fault_add(str(fault).encode(), kind, place, fault.step, fault.after, fault.seconds, fault.where.encode())
shim.fault_begin(state.encode(), log.encode())
os.chdir(state)
def write(name, content, sync=False):
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, content)
    if sync:
        os.fsync(file)
    os.close(file)
def sync_folder():
    folder = os.open(".", os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
def attempt(action):
    try:
        action()
    except OSError as error:
        print(error.strerror)
    else:
        print("done")
"""


def run(folder: Path, program: str, *faults: Fault) -> tuple[int, list[str]]:
    state = folder / "state"
    state.mkdir()
    outcome = subprocess.run(
        [
            sys.executable,
            "-c",
            BEGIN.format(here=str(Path(__file__).parents[2])) + program,
            state,
            folder / "log",
            *map(str, faults),
        ],
        env={**os.environ, "LD_PRELOAD": str(library())},
        capture_output=True,
        text=True,
    )
    assert outcome.returncode in (0, -signal.SIGKILL), outcome.stderr
    assert [line["fault"] for line in happened(folder / "log")] == [str(fault) for fault in faults]
    return outcome.returncode, outcome.stdout.splitlines()


@needs_faults
def test_a_power_cut_takes_what_no_sync_has_reached_and_nothing_else(tmp_path: Path) -> None:
    program = """
write("synced", b"1\\n", sync=True)
write("unsynced", b"1\\n", sync=True)
write("unsynced", b"2" * 9)
write("new", b"content", sync=True)
write("old", b"before", sync=True)
os.rename("new", "old")
write("kept-new", b"content", sync=True)
os.rename("kept-new", "kept")
sync_folder()
write("other-new", b"content", sync=True)
os.rename("other-new", "other")
write("last", b"x")
"""
    code, _ = run(tmp_path, program, Fault("power", "disk", 1, where="last"))
    assert code == -signal.SIGKILL
    state = tmp_path / "state"
    assert (state / "synced").read_bytes() == b"1\n"
    assert (state / "unsynced").read_bytes() in [b"1\n" + b"2" * count for count in (0, 3, 6, 9)]
    assert (state / "old").read_bytes() == b"content", "the folder was synced after it"
    assert (state / "kept").read_bytes() == b"content"
    assert not (state / "other").exists()
    assert (state / "other-new").read_bytes() == b"content"


@needs_faults
def test_a_disk_error_comes_at_its_step_and_goes(tmp_path: Path) -> None:
    program = """
for number in range(5):
    attempt(lambda: write(f"file{number}", b"x"))
attempt(lambda: os.unlink("file0"))
attempt(lambda: os.rename("file4", "file5"))
attempt(sync_folder)
"""
    full, read_only, failing = Fault("full", "disk", 3), Fault("read-only", "disk", 3), Fault("io-error", "disk", 1)
    _, said = run(tmp_path, program, full, read_only, failing)
    full_disk, read_only_disk, failing_disk = "No space left on device", "Read-only file system", "Input/output error"
    assert said == ["done", "done", full_disk, "done", "done", read_only_disk, failing_disk, "done"]


@needs_faults
def test_the_clock_jumps_for_python_alone(tmp_path: Path) -> None:
    program = """
print(datetime.datetime.now().timestamp())
write("file", b"x")
print(datetime.datetime.now().timestamp())
"""
    _, said = run(tmp_path, program, Fault("clock", "disk", 1, seconds=-86400))
    before, after = map(float, said)
    assert -86401 < after - before < -86300
