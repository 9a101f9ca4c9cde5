"""A command whose questions are answered: ``answering ANSWERS silo consent withdraw …``; a comma begins a new line."""

from __future__ import annotations

import getpass
import importlib
import io
import sys


def main() -> None:
    _, answers = sys.argv.pop(0), sys.argv.pop(0)
    sys.stdin = io.StringIO("".join(f"{answer}\n" for answer in answers.split(",")))
    getpass.getpass = lambda *_, **__: input()  # it would ask the terminal at which the tests were started
    importlib.import_module(f"medsilo.{sys.argv[0]}.cli").main()
