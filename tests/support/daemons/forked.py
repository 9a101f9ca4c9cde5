"""Daemons forked from a process that has PyTorch loaded already: real processes that start in a moment."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.forkserver import ensure_running
from pathlib import Path

from tests.support.runs import faults

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads do not survive a fork
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",  # the first optimiser of a process would load it, for seconds
        "medsilo.coordinator.cli",
        "medsilo.coordinator.daemon",
        "coordinator.store",
        "medsilo.silo.cli",
        "medsilo.silo.run.daemon",
        "medsilo.silo.training.private_training",
        "medsilo.silo.commands.shard",
    ]
)
FAULTS = faults.library()
"""What lets faults happen in daemons that ask for them (``deadly``); None without a C compiler."""


def _start_forking() -> None:
    before = os.environ.get("LD_PRELOAD")
    if FAULTS is not None:
        os.environ["LD_PRELOAD"] = str(FAULTS)
    try:
        ensure_running()
    finally:
        os.environ.pop("LD_PRELOAD", None)
        if before is not None:
            os.environ["LD_PRELOAD"] = before


class Forked:
    """What a console script would be, with as much of ``subprocess.Popen`` as the tests use."""

    def __init__(self, command: Sequence[str], folder: Path, log: Path) -> None:
        _start_forking()
        self._process = _FORKS.Process(target=_run, args=(list(command), folder, log), daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("a forked daemon", timeout or 0)
        return code

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


def _run(command: list[str], folder: Path, log: Path) -> None:
    gc.freeze()  # what was there before the fork is not gone through again, and its pages stay shared
    os.chdir(folder)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.pop("LD_PRELOAD", None)
    sys.argv = command
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    # A test's own program stands in a module beside this one.
    name = (
        f"{__package__}.{command[0]}"
        if (Path(__file__).parent / f"{command[0]}.py").exists()
        else f"medsilo.{command[0]}.cli"
    )
    main = importlib.import_module(name).main
    code = 0
    try:
        main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Without the interpreter's end: multiprocessing would hang on threads that the daemon has left.
    os._exit(code)
