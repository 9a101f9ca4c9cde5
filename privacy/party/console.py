"""How the three commands end: an error is one message on stderr and an exit code, never a stack of calls."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from medsilo.privacy.errors import ConfigurationError, MedsiloError
from medsilo.privacy.files.durable import disk_error
from medsilo.privacy.printable import printable
from medsilo.protos.versions import OLDEST_VERSION, PROTOCOL_VERSION


def run(app: typer.Typer) -> None:
    """Runs a command line application; ``docs/exit-codes.md`` lists the codes it exits with."""
    gc.freeze()  # modules stay to the end: a look at each of their objects, at the exit too, costs a tenth of a second
    errors = PlainConsole(stderr=True, highlight=False)
    try:
        app()
    except MedsiloError as error:
        _end(errors, error)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            os._exit(141)  # the reader of our output (head, less) went away; there is nobody to tell
        failed = disk_error(error, error.filename or "what this command writes")
        if failed is None:
            raise
        _end(errors, failed)
    except SystemExit as ending:
        if ending.code == 130:  # what Typer makes, silently, of Ctrl-C
            errors.print("stopped; the same command goes on from here")
        raise


def _end(errors: Console, error: MedsiloError) -> NoReturn:
    with contextlib.suppress(OSError):  # a full disk may hold the file that we speak into, too
        errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
    sys.exit(error.exit_code)


class PlainConsole(Console):
    """Of texts, in tables too, only what can be read reaches the terminal: no escape sequence, whoever wrote them."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Rich calls this for every string that it is to show."""
        return super().render_str(printable(text, lines=True), **options)


def _output() -> Console:
    console = PlainConsole(highlight=False)
    return console if console.is_terminal else PlainConsole(highlight=False, width=140)


out = _output()
"""Where commands print: as wide as the terminal, or wide enough for every table in a file."""


def say(text: str) -> None:
    """Prints a sentence as it is, broken where the terminal's line ends."""
    out.print(text, markup=False, soft_wrap=True)


def ask(asking: bool, what: str, otherwise: str) -> str:
    """An answer from the terminal; raises ``ConfigurationError`` where nobody is there to be asked."""
    if not asking:
        raise ConfigurationError(f"{what} is missing, and there is no terminal to ask at; {otherwise}")
    answer: str = typer.prompt(what)
    return answer


def application(summary: str, *, program: str | None = None) -> typer.Typer:
    """A command line application in this project's ways; ``program``: its name, for one that tells its version."""
    app = typer.Typer(
        help=summary,
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )

    def tell(wanted: bool) -> None:
        if wanted:
            typer.echo(f"{program} {medsilo_version()}, protocol version {PROTOCOL_VERSION} (from {OLDEST_VERSION} on)")
            raise typer.Exit

    def begin(
        # Not as an annotation, which Typer could not evaluate: `tell` is a name of this function.
        version: bool = typer.Option(False, "--version", callback=tell, is_eager=True, help="Show the version."),
    ) -> None:
        pass

    if program is not None:
        app.callback()(begin)
    return app


def medsilo_version() -> str:
    """Medsilo's version as installed."""
    try:
        return version("medsilo")
    except PackageNotFoundError:
        return "(not installed)"
