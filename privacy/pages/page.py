"""A document as a page, and on a terminal."""

from __future__ import annotations

from importlib.resources import files

import jinja2
from rich.console import Console

from medsilo.privacy.pages.blocks import Document

_TEMPLATE = files("medsilo.privacy.pages") / "templates" / "document.html"


def page(document: Document) -> bytes:
    """A document as one page: no script, nothing from elsewhere, the same on paper."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(document=document).strip().encode()


def print_page_one(document: Document, out: Console) -> None:
    """A document's questions with their answers, on a terminal."""
    out.print(document.title, style="bold", markup=False)
    for warning in document.warnings:
        out.print(warning, style="bold yellow", markup=False, soft_wrap=True)
    for answer in document.answers:
        out.print(f"{answer.question} {answer.verdict}.", style="bold", markup=False, soft_wrap=True)
        for point in answer.points:
            out.print(f"  - {point}", markup=False, soft_wrap=True)
        if answer.sentences:
            out.print(f"  {' '.join(answer.sentences)}", markup=False, soft_wrap=True)
