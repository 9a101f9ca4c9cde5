"""A draft's files: a page to read and print, Markdown to go on writing in, and the same statements for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from medsilo.privacy.dossier.draft import Draft
from medsilo.privacy.dossier.parts import sections
from medsilo.privacy.dossier.questionnaire import Answers
from medsilo.privacy.files.durable import write_atomically
from medsilo.privacy.pages.blocks import (
    Answered,
    Block,
    Document,
    Fact,
    Heading,
    Paragraph,
    Records,
    Section,
    Steps,
    harmless,
)
from medsilo.privacy.pages.page import page
from medsilo.privacy.pages.wording import grouped, minute, number_of
from medsilo.privacy.report.page_one import answers as answers_of
from medsilo.privacy.report.page_one import warnings

FORM = "medsilo-dossier"
VERSION = 1
_TAKEN_FROM_REPORT = ("What left?", "To whom?", "What risk remains?", "Is the record sound?")
_LABEL = {
    "record": "On record",
    "hospital": "The hospital states",
    "beside": "Beside the record",
    "blank": "TO FILL IN",
}


def write_dossier(draft: Draft, answers: Answers, folder: Path) -> tuple[Document, list[Path]]:
    """Writes ``dossier.html``, ``dossier.md`` and ``dossier.json``; returns what the page says, and their paths."""
    document = make_document(draft, answers)
    folder.mkdir(parents=True, exist_ok=True)
    content = {"html": page(document), "md": _markdown(document), "json": _json(draft, answers)}
    paths = [folder / f"dossier.{name}" for name in content]
    for path, text in zip(paths, content.values(), strict=True):
        write_atomically(path, text)
    return document, paths


def make_document(draft: Draft, answers: Answers) -> Document:
    """A draft in words: in one minute what it holds, then its parts, then the records."""
    report = draft.report
    parts = sections(draft, answers)
    of_report = [answer for answer in answers_of(report) if answer.question in _TAKEN_FROM_REPORT]
    until = f" · record up to {minute(report.last_time)} UTC" if report.last_time else ""
    return harmless(
        Document(
            title=f"Draft for the data protection file of {report.party.name}",
            subtitle=f"To be completed, checked and signed by the controller · {report.party.uri}{until}",
            warnings=warnings(report),
            answers=[_standing(draft), *of_report, _not_claimed()],
            sections=[*parts, Section("limits", "What no text here asks for", _limits()), _records(draft)],
            evidence=f"Made from the first {grouped(report.records)} entries of the record of {report.party.uri}, "
            f"whose hash (SHA-256, root of the Merkle tree) is `{report.root_sha256}`.",
        )
    )


def _standing(draft: Draft) -> Answered:
    proven, stated, blank = (draft.of(source) for source in ("record", "hospital", "blank"))
    return Answered(
        "How far is this draft?",
        f"{number_of(blank, 'blank')} to be filled in",
        [
            f"{number_of(proven, 'statement')} on record, each with the records that prove it; "
            f"{number_of(stated, 'statement')} of the hospital, which nothing here proves."
        ],
        "attention" if blank else "good",
    )


def _not_claimed() -> Answered:
    return Answered(
        "What does it not say?",
        "Whether the processing is lawful, or the model anonymous",
        ["Both are the controller's to assess. The draft says what happened on this machine, and how that is shown."],
    )


def _limits() -> list[Block]:
    return [
        Paragraph(
            "None of the texts above asks for hashes, signatures or a record that shows tampering. Art. 30 GDPR asks "
            "for a record of processing; art. 73 EHDS for identifiable logs; the AI Act's art. 12 asks that high-risk "
            "systems can record events, so for logs, and not for evidence against tampering. Medsilo's record goes "
            "beyond them, so that nobody has to be believed, and having it fulfils none of them by itself."
        ),
        Paragraph(
            "The record holds what passed this program. What left the building another way, by other programs, persons "
            "or on paper, is not in it."
        ),
    ]


def _records(draft: Draft) -> Section:
    name = draft.report.party.name
    return Section(
        "records",
        "The records behind the statements",
        [
            Paragraph(
                "Of one record, the hash is that of its leaf in the Merkle tree (RFC 6962); of several, the hash of "
                "their leaves' hashes, in order."
            ),
            Steps(
                [
                    f"See the records of a link: `silo audit show 17 24-60 --config {name}.yaml` (or a bundle in place "
                    "of `--config`) prints them, and the hash that stands below.",
                    "Have all links of this draft resolved: `silo audit show --cited dossier.json --config "
                    f"{name}.yaml`.",
                    f"Have the record itself checked: `silo audit verify --config {name}.yaml`.",
                ]
            ),
            Records([(anchor, one.numbers, one.sha256) for one, anchor in draft.named.items()]),
        ],
    )


def _json(draft: Draft, answers: Answers) -> bytes:
    report = draft.report
    content = {
        "form": FORM,
        "version": VERSION,
        "party": report.party.uri,
        "record": {"records": report.records, "root_sha256": report.root_sha256, "audit_key_sha256": report.key_sha256},
        "sound": report.verification.sound,
        "limited_to_run": report.limited_to,
        "answers": answers.model_dump(),
        "statements": [
            {
                "part": one.part,
                "source": one.source,
                "text": one.text,
                "citations": list(one.citations),
                **({"figures": one.figures} if one.figures else {}),
            }
            for one in draft.statements
        ],
        "citations": {anchor: one.to_json() for one, anchor in draft.named.items()},
    }
    return json.dumps(content, indent=2, ensure_ascii=False).encode()


def _markdown(document: Document) -> bytes:
    lines = [f"# {document.title}", "", document.subtitle, ""]
    for warning in document.warnings:
        lines += [f"**{_plain(warning)}**", ""]
    for answer in document.answers:
        said = " ".join([*answer.points, *answer.sentences])
        lines += [f"**{answer.question} {_plain(answer.verdict)}.** {_plain(said)}".rstrip(), ""]
    for section in document.sections:
        lines += [f"## {section.title}", ""]
        for block in section.blocks:
            lines += [*_markdown_of(block), ""]
    return "\n".join([*lines, _plain(document.evidence), ""]).encode()


def _markdown_of(block: Block) -> Iterator[str]:
    match block:
        case Heading():
            yield f"### {_plain(block.text)}"
        case Paragraph():
            yield _plain(block.text)
        case Steps():
            yield from (f"{number}. {_plain(item)}" for number, item in enumerate(block.items, start=1))
        case Fact():
            links = "".join(f" [{one.label}](#{one.anchor})" for one in block.cited)
            blank = " ______________________" if block.source == "blank" else ""
            yield f"*{_LABEL[block.source]}:* {_plain(block.text)}{links}{blank}"
        case Records():
            yield "| records | SHA-256 |"
            yield "| --- | --- |"
            for anchor, numbers, sha256 in block.items:
                yield f'| <a id="{anchor}"></a>{numbers} | `{sha256}` |'


_MARKUP = str.maketrans({sign: f"\\{sign}" for sign in "\\*_[]<>|#"})


def _plain(text: str) -> str:
    """Text in Markdown: only what stands between backticks is markup."""
    parts = text.replace("\n", " ").split("`")
    return "".join(f"`{part}`" if place % 2 else part.translate(_MARKUP) for place, part in enumerate(parts))
