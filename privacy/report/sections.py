"""A report's sections: every byte by kind, run and round; receivers, consents, refusals; risks; how to check it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from medsilo.privacy.consent.early_end import Cause
from medsilo.privacy.exposure import MEANING, Exposure
from medsilo.privacy.journal.records import ApprovalRecord, WithdrawalRecord
from medsilo.privacy.pages.blocks import Block, Fold, Heading, Paragraph, Picture, Section, Steps, Table
from medsilo.privacy.pages.plots import Strip, bars_by_round
from medsilo.privacy.pages.wording import (
    capital,
    grouped,
    last_part,
    listed,
    minute,
    number_of,
    ranges,
    readable_bytes,
    rounds_of,
    text_of,
    yes_or_no,
)
from medsilo.privacy.report.model import Answer, Report, Run, add_counts, in_order
from medsilo.privacy.report.words import NAME, TELLING, nothing_refused, updates_arrived

MOST_BARS = 40
"""More rounds than that share bars in pictures, and rows in the tables below them."""


def sections(report: Report) -> list[Section]:
    """All sections, in the order in which they are read; empty ones are left out."""
    found = [
        Section("kinds", "What left, by kind", list(_kinds(report))),
        Section("hospitals", "Hospital by hospital, method by method", [] if report.of_silo else _matrices(report)),
        Section("egress", "What the kernel let out", list(_egress(report))),
        Section("rounds", "What left, run by run and round by round", list(_runs(report))),
        Section("back", "What came back", list(_came_back(report))),
        Section("receivers", "To whom" if report.of_silo else "From whom", list(_receivers(report))),
        Section("consent", "On which consent", list(_consent(report))),
        Section("refused", "What was refused", list(_refused(report))),
        Section("risk", "What was not protected, and the risk that remains", list(_risk(report))),
        Section("check", "Is the record sound, and how to check it yourself", list(_check(report))),
        Section("fields", "Field by field", list(_fields(report))),
    ]
    return [section for section in found if section.blocks]


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
            [
                _named(exposure),
                MEANING[exposure],
                grouped(sums[exposure]),
                yes_or_no(exposure in TELLING),
            ]
            for exposure in in_order(sums)
        ],
        [2],
        [31, 44, 12, 13],
    )
    yield Paragraph(
        f"In all {grouped(report.bytes_left)} bytes of messages. What carries them (TLS, HTTP/2, TCP) comes on top: it "
        "holds addresses, the parties' certificates, the names of the calls, and nothing else. "
        + (
            "An entry is written before its message is sent: where a connection broke, less may have left than stands "
            "here, never more."
            if report.of_silo
            else "An entry is written when its message has arrived: where a connection broke, more may have left a "
            "hospital than stands here; its own record has it."
        )
    )


def _egress(report: Report) -> Iterator[Block]:
    if not report.egress:
        return
    yield Paragraph(
        "The program ran in a network namespace without any device but loopback; a relay beside it, which has no keys "
        "and no images, connects to the addresses below alone. Counts are the kernel's, of bytes within TCP; each "
        "packet has headers of TCP and IP (40 to 120 bytes) too. Files, and programs of the machine, are not in it. "
        "What the kernel counted, this program wrote down: the record is as good as the account that it runs under."
    )
    yield Table(
        "The kernel's count, beside the record's",
        ["Process", "To", "Kernel: bytes out", "Record: bytes of messages", "Carriage (at most)", "Stopped attempts"],
        [
            [
                f"{place}\n{number_of(way.connections, 'connection')}, {number_of(way.calls, 'call')}, "
                f"{number_of(way.segments, 'packet')}",
                f"`{way.address}`" + (f"\nto {listed(list(way.witnesses))}" if way.witnesses else ""),
                grouped(way.sent) + (f"\nand {grouped(way.retransmitted)} again" if way.retransmitted else ""),
                grouped(way.attributed),
                f"{grouped(way.overhead)} ({grouped(way.allowance)})",
                "" if way.witnesses else grouped(one.refused),
            ]
            for place, one in enumerate(report.egress, start=1)
            for way in one.ways
        ],
        [2, 3, 4, 5],
        [20, 20, 16, 16, 16, 12],
    )


def _matrices(report: Report) -> list[Block]:
    if not report.left:
        return []
    by_method = report.methods()
    measured = Exposure.DERIVED_ACCURACY
    for run in report.runs:
        if run.method and measured in run.came_back:
            add_counts(by_method[run.method], {measured: run.came_back[measured].bytes})
    blocks: list[Block] = [
        _matrix("Bytes that left each hospital, by kind", "Hospital", report.hospitals(), last_part),
        _matrix("Bytes that left all hospitals by each method, by kind", "Method", by_method, str),
    ]
    if any(measured in row for row in by_method.values()):
        blocks.append(
            Paragraph(
                "Accuracies on public images are the coordinator's measurements on hospitals' models: the bytes are "
                "those that told hospitals of them."
            )
        )
    if any(run.method for run in report.runs):
        blocks += _exposure_and_accuracy(report)
    blocks += [
        Paragraph(
            f"{number_of(len(one.late), 'round')} of run {one.run} ended without an update of {one.silo}: "
            f"{ranges(one.late)}. What was made of them was made of the others' updates."
        )
        for one in report.attendance
        if one.late
    ]
    return blocks


def _exposure_and_accuracy(report: Report) -> list[Block]:
    accuracy = {shared.run: shared for shared in report.accuracies}
    rows = []
    for run in report.runs:
        if run.method:
            shared = accuracy.get(run.name)
            rows.append(
                [
                    f"{run.method}\n(run {run.name})",
                    capital(run.statement),
                    readable_bytes(run.bytes_left // max(1, len(run.peers))),
                    f"{100 * shared.mean:.1f} % ({number_of(shared.silos, 'hospital')})" if shared else "not shared",
                ]
            )
    column = "Accuracy (synthetic data)" if report.synthetic else "Accuracy"
    return [
        Table(
            "Each method's exposure beside its accuracy",
            ["Method", "What left", "Bytes a hospital", column],
            rows,
            [2, 3],
            [20, 40, 16, 24],
        ),
        Paragraph(
            "Accuracy is the mean of what hospitals last measured on their own test images, of those that consented to "
            "share it. Runs on different images cannot be compared by it."
            + (" Accuracies on synthetic data say nothing about real images." if report.synthetic else "")
        ),
    ]


def _matrix(caption: str, first: str, table: Mapping[str, Mapping[Exposure, int]], name: Callable[[str], str]) -> Table:
    """Bytes by row and telling class; what says nothing about patients shares a column."""
    columns = [exposure for exposure in TELLING if any(exposure in row for row in table.values())]
    rows = []
    for key, row in table.items():
        rest = sum(count for exposure, count in row.items() if exposure not in TELLING)
        cells = [grouped(row[exposure]) if exposure in row else "–" for exposure in columns]
        rows.append([name(key), *cells, grouped(rest)])
    return Table(
        caption,
        [first, *(f"{NAME[exposure]} (bytes)" for exposure in columns), "Nothing about patients (bytes)"],
        rows,
        list(range(1, len(columns) + 2)),
        [2] * (len(columns) + 2),
    )


def _runs(report: Report) -> Iterator[Block]:
    for place, run in enumerate(report.runs):
        yield Heading(f"{run.occasion}: {run.statement}")
        if not run.left:
            yield Paragraph("Nothing left.")
            continue
        to = listed([f"`{peer or 'not identified'}`" for peer in run.peers])
        plan = f" The plan's hash (SHA-256): `{run.plan_sha256}`." if run.plan_sha256 else ""
        yield Paragraph(
            f"{capital(readable_bytes(run.bytes_left))} went to {to}{run.during}.{plan}"
            if report.of_silo
            else f"{capital(readable_bytes(run.bytes_left))} came from {to}{run.during}.{plan}"
        )
        if run.start is not None:
            yield Paragraph(run.start)
        if run.helped.words:
            yield Paragraph(run.helped.words)
        yield Table(
            f"Kinds of content that left: {run.in_words}",
            ["Kind of content", "Bytes", "Messages", "Rounds", "Tells about patients?"],
            [
                [
                    NAME[exposure],
                    grouped(flow.bytes),
                    grouped(flow.messages),
                    run.spoken_rounds(flow.rounds),
                    yes_or_no(exposure in TELLING),
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
        f"Bytes by round, {run.in_words}. Each kind has a scale of its own. "
        + "; ".join(f"{strip.name}: at most {readable_bytes(max(strip.values))}" for strip in strips),
    )
    yield Fold(
        "The same figures as a table",
        [
            Table(
                f"Bytes by round, {run.in_words}",
                [unit, *(strip.name for strip in strips)],
                [[label, *(grouped(strip.values[index]) for strip in strips)] for index, label in enumerate(labels)],
                list(range(1, len(strips) + 1)),
                [1] + [2] * len(strips),
            )
        ],
    )


def _came_back(report: Report) -> Iterator[Block]:
    flows = [(run, flow) for run in report.runs for flow in run.came_back.values()]
    if not flows:
        yield Paragraph("Nothing.")
        return
    carrying = [(run, flow) for run, flow in flows if flow.exposure not in (Exposure.PROTOCOL, Exposure.IDENTITY)]
    if carrying:
        yield Paragraph(
            "What hospitals get back is made from what others sent. It matters here because the same happens to what "
            "this hospital sent."
            if report.of_silo
            else "What the coordinator handed back to hospitals, and so what of one hospital reaches others."
        )
        yield Table(
            "What came back to " + ("the hospital" if report.of_silo else "hospitals"),
            ["Occasion", "Kind of content", "What it is", "Bytes", "Rounds"],
            [
                [
                    capital(run.in_words),
                    _named(flow.exposure),
                    MEANING[flow.exposure],
                    grouped(flow.bytes),
                    run.spoken_rounds(flow.rounds),
                ]
                for run, flow in carrying
            ],
            [3],
            [18, 28, 32, 12, 10],
        )
    rest = sum(flow.bytes for _, flow in flows) - sum(flow.bytes for _, flow in carrying)
    yield Paragraph(f"{grouped(rest)} bytes of round numbers, plans, names and certificates came back besides.")


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
                f"{minute(peer.first_time)}\n{minute(peer.last_time)}",
            ]
            for peer in report.peers.values()
        ],
        [1, 2],
        [44, 16, 16, 24],
    )
    certificates = [
        [last_part(peer.identity) or "not identified", f"`{digest}`"]
        for peer in report.peers.values()
        for digest in peer.certificates
    ]
    if certificates:
        yield Table("The certificates that they showed (SHA-256)", ["Party", "Certificate"], certificates, [], [22, 78])
    else:
        yield Paragraph(
            "No certificates are on record: the connection was in plain text, within one machine."
            if report.in_plain_text
            else "No certificates are on record yet: they are from joining a run on."
        )


def _consent(report: Report) -> Iterator[Block]:
    if not report.of_silo:
        if not report.answers:
            yield Paragraph("No hospital has answered a plan yet.")
            yield from _decisions(report)
            return
        delivered = {(one.run, one.silo): one.rounds_delivered for one in report.attendance}
        yield Table(
            "Hospitals' last answers to the plans",
            ["Hospital", "Run", "Answer", "What its consent lacked", "When (UTC)"],
            [
                [
                    answer.silo,
                    answer.run,
                    _answered(answer, delivered.get((answer.run, answer.silo), 0)),
                    ", ".join(answer.missing) or "–",
                    minute(answer.time),
                ]
                for answer in report.answers
            ],
            [],
            [20, 18, 14, 28, 20],
        )
        yield from _decisions(report)
        return
    if not report.consents:
        yield Paragraph("No consent is on record.")
        return
    yield Table(
        "The hospital's consent, each time it changed",
        ["From (UTC)", "What it agreed to"],
        [
            [f"{minute(record['time'])}{_until(record)}\n{_of_runs(record['runs'])}", _agreed(record)]
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
    yield from _decisions(report)


def _decisions(report: Report) -> Iterator[Block]:
    if report.decisions:
        yield Table(
            "Approvals and withdrawals" if report.of_silo else "Hospitals' withdrawals",
            ["When (UTC)", "Decision"],
            [[minute(record.time), _decision(record)] for record in report.decisions],
            [],
            [22, 78],
        )


def _until(record: Mapping[str, Any]) -> str:
    until = f" to {minute(record['until'])}" if record.get("until") else ""
    return until + ("\ngiven anew" if record.get("given_anew_after") else "")


def _of_runs(runs: list[str]) -> str:
    return f"for run{'s' * (len(runs) > 1)} {listed(runs)}" if runs else "in force for no run"


def _agreed(record: Mapping[str, Any]) -> str:
    """A consent in full: one line for each entry of its file, whatever entries it has."""
    consent = record["consent"]
    lines = []
    for key, value in consent.items():
        if key != "sha256":
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            if isinstance(value, dict):
                shown = ", ".join(f"{name} {'none' if one is None else one}" for name, one in value.items())
            lines.append(f"{key}: `{'none' if shown in (None, '') else shown}`")
    of = "Given with an invitation, whose" if record.get("purpose") == "enrolment" else "The file's"
    return "\n".join([*lines, f"{of} hash (SHA-256): `{text_of(consent, 'sha256')}`"])


def _named(exposure: Exposure) -> str:
    return f"{NAME[exposure]}\n`{exposure}`"


def _answered(answer: Answer, delivered: int) -> str:
    if answer.accepted:
        return "agreed"
    return f"declined, after {number_of(delivered, 'round')} of it" if delivered else "declined"


def _decision(record: ApprovalRecord | WithdrawalRecord) -> str:
    run = record.run or "?"
    if isinstance(record, ApprovalRecord):
        return f"Run {run} was approved; its plan's hash (SHA-256):\n`{record.plan_sha256}`"
    what = _arrived(record)
    why = ""
    if record.reason and record.reason != record.cause:
        why = f"\nIts reason, which was not sent: {record.reason}"
    signed = "\nThe hospital has signed this; the statement is in the record." if record.statement else ""
    whose = f"{record.silo}: its" if record.silo else "The"
    cause = record.cause or Cause.WITHDRAWN
    ended = f"consent to run {run} was withdrawn" if cause == Cause.WITHDRAWN else f"part in run {run} ended ({cause})"
    return f"{whose} {ended}.{what}{why}{signed}"


def _arrived(record: WithdrawalRecord) -> str:
    """What had become of the updates of a hospital whose part ended; only the coordinator knows of the last one."""
    arrived = record.rounds_acknowledged
    if not isinstance(arrived, list) or not all(isinstance(number, int) for number in arrived):
        return ""
    if "dropped_round" not in vars(record) or not arrived:
        return f" {capital(updates_arrived(arrived))}."
    said = f" Its updates of {rounds_of(arrived)} had arrived"
    dropped = record.dropped_round
    if isinstance(dropped, int):
        said += f"; that of round {dropped + 1}, which was still open, was used for nothing"
    return f"{said}."


def _refused(report: Report) -> Iterator[Block]:
    if not report.refusals:
        yield Paragraph(nothing_refused(of_silo=report.of_silo))
        return
    yield Table(
        "What was refused, and why",
        ["When (UTC)", "What", "Why", "Times"],
        [
            [
                minute(refusal.first_time)
                if refusal.times == 1
                else f"{minute(refusal.first_time)}\nto {minute(refusal.last_time)}",
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
    return f"Message ({rpc}) {to} {last_part(peer) or 'a party that was not identified'}"


def _risk(report: Report) -> Iterator[Block]:
    telling = report.telling()
    if not telling:
        yield Paragraph("Nothing that says anything about patients left, so there was nothing to protect.")
        return
    yield Paragraph(
        (
            "It went in plain text, within one machine. "
            if report.in_plain_text
            else "On its way, everything was encrypted. "
        )
        + "The coordinator, however, sees what each hospital sends as it is, and hands on what stands under “What came "
        "back”. Who has received something can keep it, and try on it later whatever becomes known by then."
    )
    yield Heading("Privacy loss")
    for statement in report.privacy_statements():
        yield Paragraph(statement)
    if report.rehearsals:
        yield Heading("Tried out here")
        for rehearsal in report.rehearsals:
            yield Paragraph(str(rehearsal))
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
                report.risk(exposure),
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
            "Have the record written to one file, the bundle: "
            f"`{command} audit export --config {report.party.name}.yaml`",
            f"Check it: `{command} audit verify BUNDLE`. Exit code 0 means sound; else it names the first entry that "
            "is not. The record's hash must be the one below.",
            *(
                [
                    "There is no other side's bundle to compare it with: the server keeps no journal and signs "
                    "nothing. Compare the key's fingerprint below with `keys/audit.pub` in the hospital's state folder."
                ]
                if report.foreign
                else [
                    f"Ask {other} for its own bundle and compare the two: `{command} audit verify BUNDLE --peer "
                    "OTHER`. What one side holds and the other does not is named.",
                    "Compare the key: the record is signed with the audit key whose public half has the fingerprint "
                    f"below. It must be the one that {other} knows as {report.party.name}'s.",
                ]
            ),
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
                    f"{NAME[exposure]}, {run.in_words}: fields of the messages",
                    ["Field", "Bytes"],
                    [[f"`{path}`", grouped(count)] for path, count in flow.fields.items()],
                    [1],
                    [75, 25],
                )
            ]
            if flow.tensors:
                blocks.append(
                    Table(
                        f"{NAME[exposure]}, {run.in_words}: tensors",
                        ["Tensor", "Shape and number format", "Rounds"],
                        [
                            [
                                f"`{name}`",
                                f"{'×'.join(map(str, tensor.shape)) or 'one number'} {tensor.dtype}",
                                run.spoken_rounds(tensor.among(flow.rounds)),
                            ]
                            for name, tensor in flow.tensors.items()
                        ],
                        [],
                        [52, 32, 16],
                    )
                )
            yield Fold(f"{NAME[exposure]}, {run.in_words}: {readable_bytes(flow.bytes)}", blocks)
