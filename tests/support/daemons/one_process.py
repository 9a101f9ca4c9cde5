"""Experiments in the command's own process, which is forked with PyTorch loaded: ``one_process simulation run …``, or
``one_process PAGE.md`` for the examples of a page, ``one_process medsilo`` for those of the public names. That runs
have processes of their own is tested elsewhere."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn

import medsilo
from medsilo.algorithms.datasets import ImageDataset
from medsilo.simulation import scheduling
from medsilo.simulation.execution import Outcome, execute
from medsilo.simulation.experiment import Run


@contextlib.contextmanager
def _here(_workers: int) -> Iterator[scheduling.Submit]:
    def submit(run: Run, stop: Path, dataset: ImageDataset | None) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        future.set_result(execute(run, stop, dataset=dataset))
        return future

    yield submit


def main() -> None:
    sys.argv.pop(0)
    scheduling._processes = _here
    if sys.argv[0].endswith(".md"):
        _run({sys.argv[0]: re.sub(r"^```.*$", "", Path(sys.argv[0]).read_text(), flags=re.MULTILINE)})
    elif sys.argv[0] == "medsilo":
        public = {name: getattr(medsilo, name) for name in medsilo.__all__}
        _run({name: inspect.getdoc(thing) or "" for name, thing in {"medsilo": medsilo, **public}.items()})
    else:
        importlib.import_module(f"medsilo.{sys.argv[0]}.cli").main()


def _run(texts: dict[str, str]) -> NoReturn:
    """The examples of pages or docstrings; one without an example is a failure."""
    failed = []
    for name, text in texts.items():
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        runner.run(doctest.DocTestParser().get_doctest(text, {}, name, name, 0))
        found = runner.summarize()
        if not found.attempted or found.failed:
            failed.append(name)
    sys.exit(f"no example, or one that fails: {', '.join(failed)}" if failed else 0)
