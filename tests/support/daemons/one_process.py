"""Experiments in the command's own process, which is forked with PyTorch loaded: ``one_process simulation run …``, or
``one_process PAGE.md`` for the examples of a page. That runs have processes of their own is tested elsewhere."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

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
    if not sys.argv[0].endswith(".md"):
        importlib.import_module(f"medsilo.{sys.argv[0]}.cli").main()
        return
    page = Path(sys.argv[0])
    text = page.read_text()
    text = re.sub(r"^```.*$", "", text, flags=re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(examples)
    found = runner.summarize()
    sys.exit(0 if found.attempted and not found.failed else 1)
