"""A report as a document: page one's questions with their answers, then the sections, then the words it uses."""

from __future__ import annotations

from medsilo.privacy.pages.blocks import Document, Section, Terms, harmless, texts_of
from medsilo.privacy.pages.wording import grouped
from medsilo.privacy.report.model import Report
from medsilo.privacy.report.page_one import answers, subtitle, warnings
from medsilo.privacy.report.sections import sections
from medsilo.privacy.report.words import glossary_of


def make_document(report: Report) -> Document:
    """A report in words."""
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
    return harmless(
        Document(
            document.title,
            document.subtitle,
            document.warnings,
            document.answers,
            [*document.sections, terms],
            document.evidence,
        )
    )
