"""Gives a parser one damaged input after the other, and watches time, memory and what it raises."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzzing.mutation import mutate
from tests.fuzzing.parsers import PARSERS, Parser, generator

SECONDS = 5.0
"""The longest that one input may take, of the processor's time: a machine may be busy with other things."""
GRACE = 30.0
"""After so long without a sign of life a parser's process, stuck in C code, is killed."""
MEMORY = 1 << 30
"""How much memory a parser may ask for beyond what its process has when it starts."""
_MOST_FAILURES = 25


class Hang(BaseException):
    """An input took too long; not an ``Exception``, so that no parser takes it for its own."""


@dataclass
class Failure:
    """An input that a parser neither took nor refused."""

    index: int
    error: str
    where: str


@dataclass
class Outcome:
    """What became of a parser's inputs.

    ``seconds``: by the clock. ``slowest``: the most of the processor's time that one input took, in seconds. ``grown``:
    MiB by which its process's memory grew at its highest.
    """

    parser: str
    inputs: int = 0
    taken: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    grown: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """As it stands in the results."""
        return {
            **asdict(self),
            "seconds": round(self.seconds, 1),
            "slowest": round(self.slowest, 3),
            "grown": round(self.grown, 1),
        }


def input_of(parser: Parser, name: str, seed: int, index: int) -> bytes:
    """The input of that number; it depends on nothing but the examples (whose keys are new each time) and these."""
    return mutate(generator(seed, name, index), parser.examples, parser.tokens)


def examine(
    name: str,
    count: int,
    *,
    seed: int,
    first: int = 0,
    told: Callable[[int], None] = lambda _: None,
    keep: Path | None = None,
    seconds: float | None = None,
) -> Outcome:
    """Gives a parser ``count`` inputs (or as many as ``seconds`` allow), in this process. ``keep``: folder in which
    inputs that fail are left."""
    outcome = Outcome(name)
    kinds: Counter[str] = Counter()
    with _scratch() as folder, _quiet(), _limits():
        parser = PARSERS[name](folder)
        for example in parser.examples:
            with contextlib.suppress(*parser.refusals):
                parser.read(example)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.monotonic()
        for index in range(first, first + count):
            if seconds is not None and time.monotonic() - start > seconds:
                break
            data = input_of(parser, name, seed, index)
            told(index)
            begin = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                parser.read(data)
                outcome.taken += 1
            except parser.refusals:
                outcome.refused += 1
            except (Exception, Hang) as error:
                signal.setitimer(signal.ITIMER_PROF, 0)
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(last.filename).name}:{last.lineno}"
                kinds[f"{type(error).__name__} {where}"] += 1
                if kinds[f"{type(error).__name__} {where}"] == 1 and len(outcome.failures) < _MOST_FAILURES:
                    outcome.failures.append(Failure(index, f"{type(error).__name__}: {error!s:.200}", where))
                    if keep is not None:
                        keep.mkdir(parents=True, exist_ok=True)
                        (keep / f"{name}-{seed}-{index}.bin").write_bytes(data)
                        (keep / f"{name}-{seed}-{index}.txt").write_text("".join(traceback.format_exception(error)))
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            outcome.slowest = max(outcome.slowest, time.process_time() - begin)
            outcome.inputs += 1
        outcome.seconds = time.monotonic() - start
        outcome.grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return outcome


def examine_apart(
    name: str, count: int, *, seed: int, keep: Path, told: Callable[[int], None], seconds: float | None
) -> Outcome:
    """The same in a process of its own: one that crashes or is stuck is a failure of the input that it had."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    at = context.Value("q", -1, lock=False)
    process = context.Process(target=_work, args=(theirs, at, name, count, seed, keep, seconds), daemon=True)
    process.start()
    theirs.close()
    last, since = -2, time.monotonic()
    while not mine.poll(0.5):
        told(max(0, at.value))
        if at.value != last:
            last, since = at.value, time.monotonic()
        stuck = last >= 0 and time.monotonic() - since > GRACE
        if stuck or not process.is_alive():
            if stuck:
                process.kill()
            process.join()
            if mine.poll(0):
                break
            words = f"no sign of life for {GRACE:.0f} s" if stuck else f"its process ended with {process.exitcode}"
            return Outcome(name, inputs=last + 1, failures=[Failure(last, words, "")])
    try:
        outcome: Outcome = mine.recv()
    except EOFError:
        process.join()
        return Outcome(
            name,
            inputs=max(0, at.value),
            failures=[Failure(at.value, f"its process ended with {process.exitcode}", "")],
        )
    process.join()
    told(outcome.inputs)
    return outcome


def _work(pipe: Any, at: Any, name: str, count: int, seed: int, keep: Path, seconds: float | None) -> None:
    def told(index: int) -> None:
        at.value = index

    pipe.send(examine(name, count, seed=seed, told=told, keep=keep, seconds=seconds))


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="medsilo-fuzzing-", dir=memory if memory.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Inputs that take too long raise ``Hang``, and those that ask for too much memory ``MemoryError``."""

    def late(_number: int, _frame: Any) -> None:
        raise Hang(f"more than {SECONDS:g} s of the processor's time")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    handler = signal.signal(signal.SIGPROF, late)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, handler)
