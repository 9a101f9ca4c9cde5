"""Does an experiment's runs, several at a time: in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from medsilo.algorithms.datasets import ImageDataset
from medsilo.privacy.environment import asking_nobody
from medsilo.privacy.errors import ConfigurationError, MedsiloError
from medsilo.silo.data import sources
from medsilo.simulation.execution import PROGRESS, Outcome, check_can_run, execute, is_finished
from medsilo.simulation.experiment import ExperimentConfig, Run, runs

_POLL_SECONDS = 0.5
_CONNECT_SECONDS = 10

Submit = Callable[[Run, Path, ImageDataset | None], "Future[Outcome]"]


def run_experiment(
    config: ExperimentConfig,
    data: tuple[str, ...],
    folder: Path,
    *,
    workers: int,
    console: Console,
    ray: str | None = None,
) -> None:
    """Does what is not yet done of an experiment; a run that was cut short goes on from its last checkpoint.

    Args:
        config: the experiment.
        data: data sets in place of the file's, where given.
        folder: where its runs are kept; with Ray, one that all machines see under this name.
        workers: runs at the same time, which share the machine's cores; Ray decides by itself, and gives each one core.
        console: where progress goes.
        ray: a Ray cluster's address, or ``local`` for one on this machine.

    Raises:
        ConfigurationError: the folder holds runs of another experiment, or what Ray or the engine needs is not
            installed.
        MedsiloError: runs failed; the others are done.
        KeyboardInterrupt: it was stopped; the rounds under way were ended and kept.
    """
    every = runs(config, data, folder.absolute())
    datasets = {spec: sources.open_dataset(spec) for spec in dict.fromkeys(run.data for run in every)}
    left = [run for run in every if not is_finished(run, datasets[run.data])]
    stop = folder.absolute() / f".stop-{os.getpid()}-{time.time_ns()}"
    done = len(every) - len(left)
    console.print(f"{config.name}: {done} of {len(every)} runs are done")
    if not left:
        return
    engines = check_can_run(left, datasets)
    console.print("engine: " + ", ".join(f"{engine} ({model})" for model, engine in engines.items()), markup=False)
    for note in config.notes():
        console.print(f"note: {note}", markup=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{folder}: cannot be made ({error}); name another folder with --runs") from None
    opened = _ray(ray) if ray is not None else _processes(min(workers, len(left)))
    try:
        with opened as submit, _Display(config.name, every, done, console) as display:
            # Made once, not by every process: a file is quicker opened again than handed over.
            made = {spec: dataset for spec, dataset in datasets.items() if spec == "synthetic"}
            _work(left, submit, stop, display, made)
    finally:
        stop.unlink(missing_ok=True)


def _work(left: Sequence[Run], submit: Submit, stop: Path, display: _Display, made: Mapping[str, ImageDataset]) -> None:
    futures = {submit(run, stop, made.get(run.data)): run for run in left}
    failed: list[tuple[Run, Outcome]] = []
    interrupted = False
    waiting = set(futures)
    while waiting:
        try:
            finished, waiting = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in finished:
                outcome = _outcome(future)
                display.ended(futures[future], outcome)
                if outcome.status == "failed":
                    failed.append((futures[future], outcome))
            display.refresh([futures[future] for future in waiting])
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            stop.touch()
            waiting = {future for future in waiting if not future.cancel()}
            display.say("stopping when the rounds under way have ended; Ctrl-C again stops at once")
    if interrupted:
        raise KeyboardInterrupt
    if failed:
        lines = "\n".join(f"  {run.title}: {outcome.message}" for run, outcome in failed)
        error = MedsiloError(f"{len(failed)} of {len(left)} runs failed, the others are done:\n{lines}")
        error.exit_code = failed[0][1].exit_code or 1
        raise error


def _outcome(future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except BrokenProcessPool:
        message = "its process died (out of memory?); the same command goes on, if need be with fewer runs at a time"
        return Outcome("failed", message, 1)


@contextlib.contextmanager
def _processes(workers: int) -> Iterator[Submit]:
    # Not forked: a process with PyTorch's threads in it does not survive being copied.
    context = multiprocessing.get_context("spawn")
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker)

    def submit(run: Run, stop: Path, dataset: ImageDataset | None) -> Future[Outcome]:
        # Workers begin with Ctrl-C blocked, so that none is hit by one before it can say that it leaves it to us.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return pool.submit(execute, run, stop, threads, dataset)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    try:
        yield submit
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker() -> None:
    """A worker leaves Ctrl-C and SIGTERM, which a batch system sends to all, to the command, and ends with it however
    that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()


def _connected(address: str) -> Any:
    """Ray, connected to its cluster."""
    if address == "local":
        # A secret of this cluster alone: Ray would leave one in the user's home, and every cluster that is begun
        # later on this machine would ask for it. It is read as Ray is loaded.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    try:
        import ray
    except ImportError:
        raise ConfigurationError(
            "--ray needs Ray, which is not installed; `pip install 'medsilo[ray]'`, or leave --ray out to use this "
            "machine's processes"
        ) from None
    host, separator, port = address.rpartition(":")
    if separator and port.isdigit() and "/" not in host:
        # Ray itself tries for minutes.
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"--ray {address}: cannot be reached: {error}. `ray start --head` on one of the machines begins a "
                "cluster and says its address"
            ) from None
    try:
        with asking_nobody():
            ray.init(address=address, log_to_driver=False, include_dashboard=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise ConfigurationError(
            f"--ray {address}: cannot be reached: {error}. Give the address that `ray start` says, or `local`"
        ) from None
    return ray


@contextlib.contextmanager
def _ray(address: str) -> Iterator[Submit]:
    ray = _connected(address)
    try:
        # A run is never repeated by Ray itself: the checkpoint is what it goes on from.
        remote: Any = ray.remote(num_cpus=1, max_retries=0)(execute)
        lost = (
            ray.exceptions.WorkerCrashedError,
            ray.exceptions.NodeDiedError,
            ray.exceptions.LocalRayletDiedError,
            ray.exceptions.OutOfMemoryError,
        )

        kept: dict[str, Any] = {}

        def submit(run: Run, stop: Path, dataset: ImageDataset | None) -> Future[Outcome]:
            if dataset is not None and run.data not in kept:
                kept[run.data] = ray.put(dataset)
            outcome: Future[Outcome] = Future()
            outcome.set_running_or_notify_cancel()

            def ended(task: Future[Outcome]) -> None:
                try:
                    outcome.set_result(task.result())
                except lost:
                    outcome.set_exception(BrokenProcessPool())
                except BaseException as error:
                    outcome.set_exception(error)

            remote.remote(run, stop, 1, kept.get(run.data)).future().add_done_callback(ended)
            return outcome

        yield submit
    finally:
        ray.shutdown()


class _Display:
    """What is done of the experiment, and how far the runs under way are."""

    def __init__(self, name: str, every: Sequence[Run], done: int, console: Console) -> None:
        self._since = time.time()
        self._total = len(every)
        self._done = done
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[what]}"),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=not console.is_terminal,
        )
        self._name = name
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Display:
        self._progress.start()
        self._whole = self._progress.add_task(self._name, total=self._total, completed=self._done, what="runs", left="")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._progress.console.print(text, markup=False)

    def ended(self, run: Run, outcome: Outcome) -> None:
        """Notes how a run ended."""
        if (task := self._tasks.pop(str(run.folder), None)) is not None:
            self._progress.remove_task(task)
        if outcome.status == "done":
            self._done += 1
        self.say(f"[{self._done}/{self._total}] {outcome.status}: {run.title}" + f" {outcome.message}".rstrip())
        self._progress.update(self._whole, completed=self._done)
        if self._done == self._total:
            self._progress.update(self._whole, left="")

    def refresh(self, pending: Sequence[Run]) -> None:
        """Reads how far the runs under way are."""
        seconds, rounds, running = 0.0, 0, 0
        paces: list[float] = []
        for run in pending:
            state = self._state(run)
            if state is None:
                rounds += run.config.rounds
                continue
            running += 1
            rounds += state["rounds"] - state["round"]
            pace = state["seconds_per_round"]
            paces += [pace] if pace is not None else []
            left = "" if pace is None else f"about {_duration(pace * (state['rounds'] - state['round']))} left"
            key = str(run.folder)
            if key not in self._tasks:
                self._tasks[key] = self._progress.add_task(f"  {run.title}", total=state["rounds"], what="", left="")
            self._progress.update(self._tasks[key], completed=state["round"], what="rounds", left=left)
        if paces:
            seconds = rounds * sum(paces) / len(paces) / max(1, running)
            self._progress.update(self._whole, left=f"about {_duration(seconds)} left")

    def _state(self, run: Run) -> dict[str, Any] | None:
        path = run.folder / PROGRESS
        try:
            if path.stat().st_mtime < self._since - 1:
                return None  # of a command before this one
            state: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            return None
        return state


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
