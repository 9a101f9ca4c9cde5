"""A report's files: a page that needs nothing else, a tagged PDF for paper, and JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.table import Table

from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.pages.blocks import Document, Section, Terms, harmless, texts_of
from medsilo.privacy.pages.page import page, print_page_one
from medsilo.privacy.pages.wording import grouped
from medsilo.privacy.report.as_json import as_json
from medsilo.privacy.report.format import Format
from medsilo.privacy.report.model import Report, in_order
from medsilo.privacy.report.page_one import answers, subtitle, warnings
from medsilo.privacy.report.sections import sections
from medsilo.privacy.report.words import NAME, TELLING, glossary_of

_TEMPLATE = files("medsilo.privacy.report") / "templates" / "report.typ"
_NEVER = datetime(1970, 1, 1, tzinfo=UTC)


def write_report(report: Report, folder: str | Path, formats: Iterable[Format] = tuple(Format)) -> list[Path]:
    """Writes ``report.html``, ``report.pdf`` and ``report.json``, or some of them; returns their paths.

    >>> from medsilo import Format, make_report, write_report
    >>> write_report(make_report("demo/state/hospital1/journal"), "report", [Format.HTML])
    [PosixPath('report/report.html')]
    """
    makers = {Format.HTML: to_html, Format.PDF: to_pdf, Format.JSON: to_json}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for one in dict.fromkeys(formats):
        written.append(folder / f"report.{one}")
        write_atomically(written[-1], makers[one](report))
    return written


def make_document(report: Report) -> Document:
    """A report in words: page one's questions with their answers, then the sections, then the words it uses."""
    document = Document(
        title=f"What left {report.party.name}" if report.of_silo else "What left the hospitals",
        subtitle=subtitle(report),
        warnings=warnings(report),
        answers=answers(report),
        sections=sections(report),
        evidence=f"Made from the first {grouped(report.records)} entries of the record of {report.party.uri}, whose "
        f"hash (SHA-256, root of the Merkle tree) is `{report.root_sha256}`.",
    )
    words = " ".join(texts_of(document.to_data()))
    terms = Section("words", "Words used here", [Terms(glossary_of(words))])
    return harmless(replace(document, sections=[*document.sections, terms]))


def to_json(report: Report) -> bytes:
    """The report for machines."""
    return as_json(report)


def to_html(report: Report) -> bytes:
    """The report as a page."""
    return page(make_document(report))


def to_pdf(report: Report) -> bytes:
    """The same content as PDF/UA: tagged, so that it can be read aloud. Of the same report, the same bytes."""
    import typst  # 50 MB that only this needs

    data = {**make_document(report).to_data(), "root_sha256": report.root_sha256}
    compiler = typst.Compiler(
        _TEMPLATE.read_bytes(),
        ignore_system_fonts=True,
        sys_inputs={"document": json.dumps(data)},
    )
    time = datetime.fromisoformat(report.last_time).replace(microsecond=0) if report.last_time else _NEVER
    made = compiler.compile(format="pdf", timestamp=time, pdf_standards=["ua-1"])
    if not isinstance(made, bytes):
        raise TypeError("a PDF should be one piece of bytes")
    return made


def print_report(report: Report, out: Console) -> None:
    """Page one, and a table of what left for each run, on a terminal."""
    print_page_one(make_document(report), out)
    for run in report.runs:
        title = f"Run {run.name}" if run.name else "Before any run"
        table = Table(title=f"{title}: {run.statement}; with {', '.join(run.peers)}", title_justify="left")
        for column in ("kind of content", "exposure class", "bytes", "tells about patients"):
            table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
        for exposure in in_order(run.left):
            telling = "yes" if exposure in TELLING else "no"
            table.add_row(NAME[exposure], exposure.value, grouped(run.left[exposure].bytes), telling)
        out.print(table)
