"""What ``silo train`` shows: a live line on a terminal, plain lines in a log."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn

from medsilo.privacy.consent.plan import RunPlan
from medsilo.silo.training.measuring import Progress as Training


class Display:
    """Shows round, epoch, loss, accuracy, bytes sent and time left."""

    def __init__(self, console: Console, *, as_json: bool = False) -> None:
        self._console = console
        self._as_json = as_json
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}"),
            TextColumn("accuracy {task.fields[accuracy]}"),
            TextColumn("sent {task.fields[sent]}"),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=as_json or not console.is_terminal,
        )
        self._task = self._bar.add_task("joining", total=None, state="", accuracy="–", sent="0 bytes", left="")
        self._rounds = 0
        self._first_round = 0
        self._started = time.monotonic()
        self._loss: float | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def notice(self, text: str) -> None:
        """Something that the user should know while it goes on."""
        if self._as_json:
            line = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "level": "INFO", "message": text}
            self._console.print(json.dumps(line), markup=False, highlight=False, soft_wrap=True)
            return
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True)

    def joined(self, plan: RunPlan, trained_rounds: int) -> None:
        """The plan is accepted."""
        self._rounds = plan.rounds
        self._first_round = trained_rounds
        self._started = time.monotonic()
        going_on = f", going on after round {trained_rounds}" if trained_rounds else ""
        self.notice(f"joined run {plan.run}: {plan.method.name}, {plan.rounds} rounds{going_on}")
        self._bar.update(self._task, total=plan.rounds, completed=trained_rounds, description=f"run {plan.run}")

    def waiting(self) -> None:
        """The next task is asked for."""
        self._bar.update(self._task, state="waiting for the coordinator")

    def training(self, progress: Training) -> None:
        """Local training goes on."""
        self._loss = progress.loss
        share = (progress.epoch - 1 + progress.step / progress.steps) / progress.epochs
        self._bar.update(
            self._task,
            completed=progress.round + 0.99 * share,
            description=f"round {progress.round + 1}/{self._rounds}",
            state=f"epoch {progress.epoch}/{progress.epochs} loss {progress.loss:.3f}",
        )

    def sent(self, round_number: int, accuracy: float | None, bytes_sent: int) -> None:
        """A round's update has its receipt."""
        shown = "–" if accuracy is None else f"{100 * accuracy:.1f} %"
        done = round_number + 1 - self._first_round
        left = (time.monotonic() - self._started) / max(done, 1) * (self._rounds - round_number - 1)
        remaining = f"{timedelta(seconds=round(left))} left" if left > 0 else ""
        self._bar.update(
            self._task,
            completed=min(round_number + 1, self._rounds),
            accuracy=shown,
            sent=decimal(bytes_sent),
            left=remaining,
        )
        if (self._as_json or not self._console.is_terminal) and round_number < self._rounds:
            loss = "–" if self._loss is None else f"{self._loss:.3f}"
            self.notice(
                f"round {round_number + 1}/{self._rounds}: loss {loss}, accuracy {shown}, sent so far "
                f"{decimal(bytes_sent)}" + (f", {remaining}" if remaining else "")
            )
