"""A report as a document: page one's questions with their answers, then sections of paragraphs, tables and pictures.

HTML and PDF are two views of this one document, so they hold the same content. Text is plain, with code between
backticks and line breaks; whatever a record holds is shown as text, never understood as markup.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar

from privacy.exposure import MEANING, MODEL, Exposure
from privacy.report import BEFORE, Report, Run, in_order
from privacy.report_plots import Strip, bars_by_round
from privacy.report_words import (
    NAME,
    NO_DIFFERENTIAL_PRIVACY,
    NOTHING,
    RISK,
    SHORT_RISK,
    TELLING,
    glossary_of,
    grouped,
    listed,
    readable_bytes,
)

MOST_BARS = 40
"""More rounds than that share bars in pictures, and rows in the tables below them."""

_RUNS_ON_PAGE_ONE = 6
_KINDS_ON_PAGE_ONE = 8

Tone = Literal["good", "attention", "bad", "plain"]


@dataclass(frozen=True)
class Answered:
    """A question of page one: the answer in a few words, and what is to be said about it."""

    question: str
    verdict: str
    sentences: list[str]
    tone: Tone = "plain"


@dataclass(frozen=True)
class Paragraph:
    """Text."""

    text: str
    kind: str = "paragraph"


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: str
    kind: str = "heading"


@dataclass(frozen=True)
class Table:
    """Rows of text; the first column names the row, columns in ``numbers`` (from 0) hold figures.

    ``widths``: shares of the page's width, for paper; 0 for as wide as the content.
    """

    caption: str
    columns: list[str]
    rows: list[list[str]]
    numbers: list[int]
    widths: list[int]
    kind: str = "table"


@dataclass(frozen=True)
class Picture:
    """An SVG, with what it shows in words; the same figures stand in a table after it."""

    svg: str
    description: str
    kind: str = "picture"


@dataclass(frozen=True)
class Fold:
    """Details that a page may fold away and paper shows."""

    title: str
    blocks: list[Block]
    kind: str = "fold"


@dataclass(frozen=True)
class Steps:
    """Numbered steps."""

    items: list[str]
    kind: str = "steps"


@dataclass(frozen=True)
class Terms:
    """Words and what they mean."""

    items: list[tuple[str, str]]
    kind: str = "terms"


Block = Paragraph | Heading | Table | Picture | Fold | Steps | Terms


@dataclass(frozen=True)
class Section:
    """A part of the document below its own heading; ``anchor`` is the heading's name in links."""

    anchor: str
    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Document:
    """All that a report's reader sees; ``evidence`` says what it was made from."""

    title: str
    subtitle: str
    warnings: list[str]
    answers: list[Answered]
    sections: list[Section]
    evidence: str

    def to_data(self) -> dict[str, Any]:
        """The document as JSON-like data."""
        return asdict(self)


def make_document(report: Report) -> Document:
    """A report in words."""
    sections = [
        Section("kinds", "What left, by kind", list(_kinds(report))),
        *(
            []
            if report.of_silo
            else [Section("hospitals", "Hospital by hospital, method by method", _matrices(report))]
        ),
        Section("rounds", "What left, run by run and round by round", list(_runs(report))),
        Section("back", "What came back", list(_came_back(report))),
        Section("receivers", "To whom" if report.of_silo else "From whom", list(_receivers(report))),
        Section("consent", "On which consent", list(_consent(report))),
        Section("refused", "What was refused", list(_refused(report))),
        Section("risk", "What was not protected, and the risk that remains", list(_risk(report))),
        Section("check", "Is the record sound, and how to check it yourself", list(_check(report))),
        Section("fields", "Field by field", list(_fields(report))),
    ]
    document = Document(
        title=f"What left {report.party.name}" if report.of_silo else "What left the hospitals",
        subtitle=_subtitle(report),
        warnings=_warnings(report),
        answers=_answers(report),
        sections=[section for section in sections if section.blocks],
        evidence=f"Made from the first {grouped(report.records)} entries of the record of {report.party.uri}, whose "
        f"hash (SHA-256, root of the Merkle tree) is `{report.root_sha256}`.",
    )
    words = " ".join(_texts(document.to_data()))
    terms = Section("words", "Words used here", [Terms(glossary_of(words))])
    return _harmless(
        Document(
            document.title,
            document.subtitle,
            document.warnings,
            document.answers,
            [*document.sections, terms],
            document.evidence,
        )
    )


def _subtitle(report: Report) -> str:
    whose = (
        "Report for the hospital's data protection officer"
        if report.of_silo
        else f"The coordinator's report of all hospitals of federation {report.party.federation}"
    )
    times = (
        f" · record from {_time(report.first_time)} to {_time(report.last_time)} UTC"
        if report.first_time and report.last_time
        else ""
    )
    return f"{whose} · {report.party.uri}{times}"


def _warnings(report: Report) -> list[str]:
    found = []
    if report.synthetic:
        found.append("Synthetic data. The images used were generated by a program; they show no patient.")
    if report.synthetic is None:
        found.append(
            "Whether hospitals' images show patients or are synthetic (generated by a program) is not on the "
            "coordinator's record; each hospital's own report says it."
        )
    if report.limited_to:
        left_out = f"; left out: {', '.join(report.other_runs)}" if report.other_runs else ""
        found.append(f"This report is limited to run {report.limited_to}{left_out}.")
    return found


# --- page one


def _answers(report: Report) -> list[Answered]:
    return [
        _what_left(report),
        _to_whom(report),
        _on_which_consent(report),
        _risk_in_short(report),
        _soundness(report),
        _refusals_in_short(report),
    ]


def _what_left(report: Report) -> Answered:
    runs = [run for run in report.runs if run.name != BEFORE]
    question = "What left?" if report.of_silo else "What left the hospitals?"
    if not report.bytes_left:
        return Answered(question, "Nothing", ["The record holds no message that was sent."], "good")
    statements = list(dict.fromkeys(run.statement for run in runs))
    verdict = _capital(statements[0]) if len(statements) == 1 else f"Different kinds of content in {len(runs)} runs"
    if not runs:
        verdict = _capital(NOTHING)
    sentences = []
    for run in runs[:_RUNS_ON_PAGE_ONE]:
        what = f": {run.statement}" if len(statements) > 1 else ""
        sentences.append(f"{_occasion(run)}{what}; {readable_bytes(run.bytes_left)} in all{_during(run)}.")
    if len(runs) > _RUNS_ON_PAGE_ONE:
        sentences.append(f"{len(runs) - _RUNS_ON_PAGE_ONE} more runs stand below.")
    if any(exposure in run.left for run in runs for exposure in MODEL):
        sentences.append("A model is a set of numbers that training has adjusted to the hospital's images.")
    sentences.append("No image, no single image's finding and no patient's name is among what left.")
    return Answered(question, verdict, sentences)


def _to_whom(report: Report) -> Answered:
    if not report.of_silo:
        hospitals = sum(1 for peer in report.peers.values() if peer.identity)
        return Answered(
            "To whom?",
            f"The coordinator “{report.party.name}”",
            [
                f"This is its own record of what it received from {_number(hospitals, 'hospital')}: "
                f"{readable_bytes(report.bytes_left)}.",
                *_handed_on(report),
            ],
        )
    peers = list(report.peers.values())
    if not peers:
        return Answered("To whom?", "Nobody", [])
    names = listed([f"“{_last_part(peer.identity)}”" for peer in peers])
    verdict = f"The coordinator {names}, and nobody else" if len(peers) == 1 else f"The coordinators {names}"
    proven = all(peer.certificates for peer in peers)
    return Answered(
        "To whom?",
        verdict,
        [
            "It proved its name with a certificate of the federation, and the way to it was encrypted."
            if proven
            else "The connection was in plain text (allowed only within one machine), so nothing proved its name.",
            *_handed_on(report),
        ],
        "plain" if proven else "attention",
    )


def _handed_on(report: Report) -> list[str]:
    back = {exposure for run in report.runs for exposure in run.came_back}
    own = "this hospital's" if report.of_silo else "each hospital's"
    sentences = []
    if Exposure.PEER_MODELS in back:
        sentences.append(f"It hands hospitals' models to other hospitals as they are; {own} may be among them.")
    if Exposure.CLASSIFIER_GRADIENT in back:
        sentences.append(f"It hands single hospitals' gradients, unnamed, to other hospitals; {own} are among them.")
    if Exposure.PEER_DERIVED in back:
        sentences.append(f"It hands hospitals mixtures of what all sent, so a share of {own} reaches the others.")
    return sentences


def _on_which_consent(report: Report) -> Answered:
    question = "On which consent?"
    if not report.of_silo:
        joined = {answer.silo for answer in report.answers if answer.accepted}
        declined = {answer.silo for answer in report.answers if not answer.accepted}
        verdict = f"{_number(len(joined), 'hospital')} agreed" + (f", {len(declined)} declined" if declined else "")
        return Answered(
            question,
            verdict,
            ["Each hospital's consent is a file of its own; what it says stands in that hospital's own report."],
        )
    if not report.consents:
        return Answered(question, "No consent is on record", [], "plain" if not report.bytes_left else "bad")
    latest = report.consents[-1]
    if report.outside_consent:
        names = listed([NAME[exposure].lower() for exposure in in_order(report.outside_consent)])
        return Answered(
            question,
            "NOT all that left was covered by the hospital's consent",
            [f"Without consent left: {names}. This should be impossible: ask whoever runs the silo at once."],
            "bad",
        )
    changes = len(report.consents) - 1
    withdrawals = [decision for decision in report.decisions if decision["kind"] == "withdrawal"]
    sentences = [f"In force since {_time(latest['time'])} UTC: {_consented(latest['consent'])}."]
    if changes:
        sentences.append(f"It was changed {_times(changes)}; all versions stand below.")
    sentences += [f"Withdrawn from run {_text(one, 'run')} on {_time(one['time'])} UTC." for one in withdrawals]
    return Answered(
        question,
        "The hospital's own consent; all that left was covered by it",
        sentences,
        "attention" if withdrawals else "good",
    )


def _risk_in_short(report: Report) -> Answered:
    question = "What risk remains?"
    telling = _telling(report)
    if not telling:
        return Answered(question, "None known", ["Nothing that says anything about patients left."], "good")
    reasons = [sentence for classes, sentence in SHORT_RISK if telling & set(classes)]
    return Answered(
        question,
        "Some, and no limit to it can be stated",
        [*reasons, "No noise was added (no differential privacy), so there is no proven limit (ε = ∞)."],
        "attention",
    )


def _soundness(report: Report) -> Answered:
    found = report.verification
    return Answered(
        "Is the record sound?",
        "Yes: complete and unchanged" if found.sound else "NO: do not rely on this report",
        list(found.sentences),
        "good" if found.sound else "bad",
    )


def _refusals_in_short(report: Report) -> Answered:
    question = "Was anything refused?"
    count = sum(refusal.times for refusal in report.refusals) + report.refusals_unlisted
    if not count:
        return Answered(question, "No", ["Nothing had to be refused."])
    return Answered(
        question,
        f"Yes, {_times(count)}",
        ["What was refused did not leave, and was not accepted. The reasons stand below."],
    )


# --- sections


def _kinds(report: Report) -> Iterator[Block]:
    sums: dict[Exposure, int] = {}
    for flow in report.left:
        sums[flow.exposure] = sums.get(flow.exposure, 0) + flow.bytes
    if not sums:
        yield Paragraph("Nothing left.")
        return
    yield Table(
        "Every byte that left, by kind" + ("" if report.of_silo else ", all hospitals together"),
        ["Kind of content", "What it is", "Bytes", "Tells about patients?"],
        [
            [f"{NAME[exposure]}\n`{exposure}`", MEANING[exposure], grouped(sums[exposure]), _yes(exposure in TELLING)]
            for exposure in in_order(sums)
        ],
        [2],
        [31, 44, 12, 13],
    )
    yield Paragraph(
        f"In all {grouped(report.bytes_left)} bytes of messages. What carries them (TLS, HTTP/2, TCP) comes on top: it "
        "holds addresses, the parties' certificates, the names of the calls, and nothing else. An entry is written "
        "before its message is sent: where a connection broke, less may have left than stands here, never more."
    )


def _matrices(report: Report) -> list[Block]:
    if not report.left:
        return []
    columns = in_order(flow.exposure for flow in report.left)
    blocks: list[Block] = [
        _matrix("Bytes that left each hospital, by kind", "Hospital", report.hospitals(), columns, _last_part),
        _matrix("Bytes that left all hospitals by each method, by kind", "Method", report.methods(), columns, str),
    ]
    accuracy = {shared.run: shared for shared in report.accuracies}
    rows = []
    for run in report.runs:
        if run.method is None:
            continue
        shared = accuracy.get(run.name)
        hospitals = len(run.peers)
        rows.append(
            [
                f"{run.method}\n(run {run.name})",
                _capital(run.statement),
                readable_bytes(run.bytes_left // max(1, hospitals)),
                f"{100 * shared.mean:.1f} % ({_number(shared.silos, 'hospital')})" if shared else "not shared",
            ]
        )
    if rows:
        blocks.append(
            Table(
                "Each method's exposure beside its accuracy",
                ["Method", "What left", "Bytes a hospital", _accuracy_column(report)],
                rows,
                [2, 3],
                [20, 40, 16, 24],
            )
        )
        blocks.append(
            Paragraph(
                "Accuracy is the mean of what hospitals last measured on their own test images, of those that consented "
                "to share it. Runs on different images cannot be compared by it."
                + (
                    ""
                    if report.synthetic
                    else " Whether these images are synthetic (generated by a program) is not on the coordinator's record."
                )
            )
        )
    return blocks


def _accuracy_column(report: Report) -> str:
    return (
        "Accuracy (synthetic data)" if report.synthetic else "Accuracy (patients' or synthetic images: not on record)"
    )


def _matrix(
    caption: str,
    first: str,
    table: Mapping[str, Mapping[Exposure, int]],
    columns: Sequence[Exposure],
    name: Any,
) -> Table:
    rows = [[name(key), *(grouped(row[e]) if e in row else "–" for e in columns)] for key, row in table.items()]
    return Table(
        caption,
        [first, *(NAME[exposure] for exposure in columns)],
        rows,
        list(range(1, len(columns) + 1)),
        [2] + [2] * len(columns),
    )


def _runs(report: Report) -> Iterator[Block]:
    for place, run in enumerate(report.runs):
        yield Heading(f"{_occasion(run)}: {run.statement}")
        if not run.left:
            yield Paragraph("Nothing left.")
            continue
        to = listed([f"`{peer or 'not identified'}`" for peer in run.peers])
        plan = f" The plan's hash (SHA-256): `{run.plan_sha256}`." if run.plan_sha256 else ""
        yield Paragraph(
            f"{_capital(readable_bytes(run.bytes_left))} went to {to}{_during(run)}.{plan}"
            if report.of_silo
            else f"{_capital(readable_bytes(run.bytes_left))} came from {to}{_during(run)}.{plan}"
        )
        yield Table(
            f"Kinds of content that left: {_in_words(run)}",
            ["Kind of content", "Bytes", "Messages", "Rounds", "Tells about patients?"],
            [
                [
                    NAME[exposure],
                    grouped(flow.bytes),
                    grouped(flow.messages),
                    _rounds(run, flow.rounds),
                    _yes(exposure in TELLING),
                ]
                for exposure, flow in run.left.items()
            ],
            [1, 2],
            [36, 16, 12, 18, 18],
        )
        yield from _picture(run, place)


def _picture(run: Run, place: int) -> Iterator[Block]:
    numbers = sorted({number for flow in run.left.values() for number in flow.rounds})
    if not numbers:
        return
    last = numbers[-1]
    after = run.rounds is not None and last >= run.rounds
    rounds = last if after else last + 1
    share = -(-rounds // MOST_BARS)
    bins = [range(start, min(start + share, rounds)) for start in range(0, rounds, share)]
    labels = [str(one.start + 1) if len(one) == 1 else f"{one.start + 1}–{one.stop}" for one in bins]
    if after:
        bins.append(range(rounds, last + 1))
        labels.append("end")

    def per_bin(exposures: Collection[Exposure]) -> list[int]:
        flows = [run.left[exposure] for exposure in exposures if exposure in run.left]
        return [sum(flow.rounds.get(number, 0) for flow in flows for number in one) for one in bins]

    strips = [Strip(NAME[e], True, per_bin([e])) for e in run.left if e in TELLING]
    rest = [exposure for exposure in run.left if exposure not in TELLING]
    if rest:
        strips.append(Strip(listed([NAME[rest[0]], *(NAME[e].lower() for e in rest[1:])]), False, per_bin(rest)))
    unit = "Round" if share == 1 else f"Rounds ({share} to a bar)"
    svg = bars_by_round(strips, labels, unit=unit, identifier=f"bytes-by-round-{place}")
    yield Picture(
        svg,
        f"Bytes by round, {_in_words(run)}. Each kind has a scale of its own. "
        + "; ".join(f"{strip.name}: at most {readable_bytes(max(strip.values))}" for strip in strips),
    )
    yield Fold(
        "The same figures as a table",
        [
            Table(
                f"Bytes by round, {_in_words(run)}",
                [unit, *(strip.name for strip in strips)],
                [[label, *(grouped(strip.values[index]) for strip in strips)] for index, label in enumerate(labels)],
                list(range(1, len(strips) + 1)),
                [1] + [2] * len(strips),
            )
        ],
    )


def _came_back(report: Report) -> Iterator[Block]:
    rows = [
        [
            _occasion(run),
            f"{NAME[exposure]}\n`{exposure}`",
            MEANING[exposure],
            grouped(flow.bytes),
            _rounds(run, flow.rounds),
        ]
        for run in report.runs
        for exposure, flow in run.came_back.items()
    ]
    if not rows:
        yield Paragraph("Nothing.")
        return
    yield Paragraph(
        "What hospitals get back is made from what others sent. It matters here because the same happens to what this "
        "hospital sent."
        if report.of_silo
        else "What the coordinator handed back to hospitals, and so what of one hospital reaches others."
    )
    yield Table(
        "What came back to " + ("the hospital" if report.of_silo else "hospitals"),
        ["Occasion", "Kind of content", "What it is", "Bytes", "Rounds"],
        rows,
        [3],
        [18, 28, 32, 12, 10],
    )


def _receivers(report: Report) -> Iterator[Block]:
    if not report.peers:
        yield Paragraph("Nobody.")
        return
    received, came = (
        ("Bytes sent to it", "Bytes that came back") if report.of_silo else ("Bytes it sent", "Bytes it got")
    )
    yield Table(
        "The other parties on record",
        ["Party", received, came, "First and last message (UTC)"],
        [
            [
                f"`{peer.identity or 'not identified'}`",
                grouped(peer.bytes_left),
                grouped(peer.bytes_came_back),
                f"{_time(peer.first_time)}\n{_time(peer.last_time)}",
            ]
            for peer in report.peers.values()
        ],
        [1, 2],
        [44, 16, 16, 24],
    )
    certificates = [
        [_last_part(peer.identity) or "not identified", f"`{digest}`"]
        for peer in report.peers.values()
        for digest in peer.certificates
    ]
    if certificates:
        yield Table("The certificates that they showed (SHA-256)", ["Party", "Certificate"], certificates, [], [22, 78])
    else:
        yield Paragraph("No certificates are on record: the connection was in plain text, within one machine.")


def _consent(report: Report) -> Iterator[Block]:
    if not report.of_silo:
        if not report.answers:
            yield Paragraph("No hospital has answered a plan yet.")
            return
        yield Table(
            "Hospitals' answers to the plans",
            ["Hospital", "Run", "Answer", "What its consent lacked", "When (UTC)"],
            [
                [
                    answer.silo,
                    answer.run,
                    "agreed" if answer.accepted else "declined",
                    ", ".join(answer.missing) or "–",
                    _time(answer.time),
                ]
                for answer in report.answers
            ],
            [],
            [20, 18, 14, 28, 20],
        )
        return
    if not report.consents:
        yield Paragraph("No consent is on record.")
        return
    yield Table(
        "The hospital's consent, each time it changed",
        ["From (UTC)", "What it agreed to"],
        [
            [_time(record["time"]), f"{_capital(_consented(record['consent'], complete=True))}."]
            for record in report.consents
        ],
        [],
        [22, 78],
    )
    if report.outside_consent:
        yield Paragraph(
            "NOT COVERED: "
            + "; ".join(f"{grouped(count)} bytes of {NAME[e]}" for e, count in report.outside_consent.items())
            + " left although the consent in force then did not list that kind."
        )
    else:
        yield Paragraph("Each message on record was held against the consent in force when it left: all were covered.")
    if report.decisions:
        yield Table(
            "Approvals and withdrawals",
            ["When (UTC)", "Decision"],
            [[_time(record["time"]), _decision(record)] for record in report.decisions],
            [],
            [22, 78],
        )


def _decision(record: Mapping[str, Any]) -> str:
    if record["kind"] == "approval":
        return f"Run {_text(record, 'run')} was approved; its plan's hash (SHA-256):\n`{_text(record, 'plan_sha256')}`"
    used = record.get("rounds_used")
    what = f" What it had sent was used in {_number(len(used), 'round')}." if isinstance(used, list) else ""
    statement = f"\n{_text(record, 'statement')}" if record.get("statement") else ""
    return f"Consent to run {_text(record, 'run')} was withdrawn.{what}{statement}"


def _refused(report: Report) -> Iterator[Block]:
    if not report.refusals:
        yield Paragraph("Nothing had to be refused.")
        return
    yield Table(
        "What was refused, and why",
        ["When (UTC)", "What", "Why", "Times"],
        [
            [
                _time(refusal.first_time)
                if refusal.times == 1
                else f"{_time(refusal.first_time)}\nto {_time(refusal.last_time)}",
                _refused_what(refusal.rpc, refusal.direction, refusal.peer, refusal.run),
                refusal.reason,
                grouped(refusal.times),
            ]
            for refusal in report.refusals
        ],
        [3],
        [20, 22, 48, 10],
    )
    if report.refusals_unlisted:
        yield Paragraph(f"{grouped(report.refusals_unlisted)} more refusals are on record and not listed here.")


def _refused_what(rpc: str, direction: str, peer: str, run: str) -> str:
    if not rpc:
        return f"Taking part in run {run}" if run else "–"
    to = "to" if direction == "sent" else "from"
    return f"Message ({rpc}) {to} {_last_part(peer) or 'a party that was not identified'}"


def _risk(report: Report) -> Iterator[Block]:
    telling = _telling(report)
    if not telling:
        yield Paragraph("Nothing that says anything about patients left, so there was nothing to protect.")
        return
    encrypted = all(peer.certificates for peer in report.peers.values())
    yield Paragraph(
        ("On its way, everything was encrypted. " if encrypted else "It went in plain text, within one machine. ")
        + "The coordinator, however, sees what each hospital sends as it is, and hands on what stands under “What came "
        "back”. Who has received something can keep it, and try on it later whatever becomes known by then."
    )
    yield Heading("Privacy loss")
    yield Paragraph(NO_DIFFERENTIAL_PRIVACY)
    yield Heading("Kind by kind")
    back = {exposure for run in report.runs for exposure in run.came_back} & set(TELLING)
    yield Table(
        "What someone who holds it could still do",
        ["Kind of content", "Where it went", "Risk that remains"],
        [
            [
                NAME[exposure],
                listed(
                    ["to the coordinator"] * (exposure in telling)
                    + ["to other hospitals"] * (exposure in back and exposure != Exposure.DERIVED_ACCURACY)
                    + ["measured by the coordinator"] * (exposure == Exposure.DERIVED_ACCURACY)
                ),
                RISK[exposure],
            ]
            for exposure in in_order(telling | back)
        ],
        [],
        [24, 20, 56],
    )


def _check(report: Report) -> Iterator[Block]:
    command = report.party.role
    yield Paragraph(" ".join(report.verification.sentences))
    if report.verification.first_bad_record is not None:
        yield Paragraph(f"The first entry that is not sound is number {report.verification.first_bad_record}.")
    other = "the coordinator" if report.of_silo else "a hospital"
    yield Paragraph("Nobody has to be believed. On any machine with Medsilo on it:")
    yield Steps(
        [
            f"Have the record written to one file, the bundle: `{command} audit export --config {report.party.name}.yaml`",
            f"Check it: `{command} audit verify BUNDLE`. Exit code 0 means sound; else it names the first entry that is "
            "not. The record's hash must be the one below.",
            f"Ask {other} for its own bundle and compare the two: `{command} audit verify BUNDLE --peer OTHER`. What one "
            "side holds and the other does not is named.",
            "Compare the key: the record is signed with the audit key whose public half has the fingerprint below. It "
            f"is what {other} must have been given for {report.party.name}.",
        ]
    )
    yield Table(
        "What this report was made from",
        ["What", "SHA-256"],
        [
            [f"The record's hash\n({grouped(report.records)} entries)", f"`{report.root_sha256}`"],
            ["The audit key's fingerprint", f"`{report.key_sha256}`"],
        ],
        [],
        [24, 76],
    )


def _fields(report: Report) -> Iterator[Block]:
    for run in report.runs:
        for exposure, flow in run.left.items():
            blocks: list[Block] = [
                Table(
                    f"{NAME[exposure]}, {_in_words(run)}: fields of the messages",
                    ["Field", "Bytes"],
                    [[f"`{path}`", grouped(count)] for path, count in flow.fields.items()],
                    [1],
                    [75, 25],
                )
            ]
            if flow.tensors:
                blocks.append(
                    Table(
                        f"{NAME[exposure]}, {_in_words(run)}: tensors",
                        ["Tensor", "Shape and number format", "Rounds"],
                        [
                            [
                                f"`{name}`",
                                f"{'×'.join(map(str, tensor.shape)) or 'one number'} {tensor.dtype}",
                                _between(run, tensor.first_round, tensor.last_round),
                            ]
                            for name, tensor in flow.tensors.items()
                        ],
                        [],
                        [52, 32, 16],
                    )
                )
            yield Fold(f"{NAME[exposure]}, {_in_words(run)}: {readable_bytes(flow.bytes)}", blocks)


# --- words


def _telling(report: Report) -> set[Exposure]:
    left = {flow.exposure for flow in report.left if flow.bytes}
    measured = {flow.exposure for flow in report.came_back} & {Exposure.DERIVED_ACCURACY}
    return (left | measured) & set(TELLING)


def _consented(consent: Mapping[str, Any], *, complete: bool = False) -> str:
    methods = ", ".join(consent.get("methods") or ()) or "no method"
    exposures = list(consent.get("exposures") or ())
    kinds = listed([f"`{name}`" for name in exposures]) if complete else _short(exposures)
    rounds = consent.get("rounds", 0)
    expires = consent.get("expires")
    text = f"methods {methods}; kinds of content {kinds or 'none'}; at most {_number(rounds, 'round')} a run"
    text += f"; until {expires}" if expires else "; without an end date"
    if complete:
        text = f"coordinator `{consent.get('coordinator') or 'none'}`; {text}"
        if consent.get("sha256"):
            text += f"; the file's hash (SHA-256):\n`{consent['sha256']}`"
    return text


def _short(names: Sequence[str]) -> str:
    """Classes by their plain names; protocol and identity go without saying."""
    plain = []
    for name in names:
        if name == "MODEL_PARAMETERS":
            plain.append("models")
        elif name in Exposure.__members__:
            if Exposure[name] in TELLING:
                plain.append(NAME[Exposure[name]].lower())
        else:
            plain.append(name)
    return listed(plain[:_KINDS_ON_PAGE_ONE]) + (" and others" if len(plain) > _KINDS_ON_PAGE_ONE else "")


def _occasion(run: Run) -> str:
    if run.name == BEFORE:
        return "Before any run, to ask for its plan"
    return f"Run {run.name}" + (f" (method {run.method})" if run.method else "")


def _in_words(run: Run) -> str:
    return "before any run" if run.name == BEFORE else f"run {run.name}"


def _during(run: Run) -> str:
    numbers = {number for flow in run.left.values() for number in flow.rounds}
    trained = [number for number in numbers if run.rounds is None or number < run.rounds]
    planned = f" of {run.rounds}" if run.rounds is not None and len(trained) < run.rounds else ""
    return f" in {len(trained)}{planned} round{'s' if len(trained) != 1 or planned else ''}" if trained else ""


def _rounds(run: Run, rounds: Mapping[int, int]) -> str:
    return _between(run, min(rounds, default=None), max(rounds, default=None))


def _between(run: Run, first: int | None, last: int | None) -> str:
    """Rounds counted from 1; the exchange after the last one is "end"."""
    if first is None or last is None:
        return "joining"
    ended = run.rounds is not None and last >= run.rounds
    top = run.rounds if ended and run.rounds is not None else last + 1
    spoken = [] if first + 1 > top else [str(top) if first + 1 == top else f"{first + 1}–{top}"]
    return ", ".join([*spoken, *(["end"] if ended else [])])


def _time(text: str) -> str:
    return text[:16].replace("T", " ")


def _last_part(identity: str) -> str:
    return identity.rsplit("/", 1)[-1]


def _text(record: Mapping[str, Any], key: str) -> str:
    return str(record.get(key, "?"))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _number(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{grouped(count)} times"


def _yes(condition: bool) -> str:
    return "yes" if condition else "no"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _texts(one)


T = TypeVar("T")


def _harmless(value: T) -> T:
    """The same with control and text-direction characters made visible: a refused message may have come with some."""
    changed: Any = value
    if isinstance(value, str):
        changed = "".join(
            character if character == "\n" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn")
            else "\N{REPLACEMENT CHARACTER}"
            for character in value
        )  # fmt: skip
    elif isinstance(value, (list, tuple)):
        changed = type(value)(_harmless(one) for one in value)
    elif is_dataclass(value) and not isinstance(value, type):
        changed = type(value)(**{one.name: _harmless(getattr(value, one.name)) for one in fields(value)})
    return changed
