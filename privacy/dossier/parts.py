"""The parts of a draft: what each text of law or guidance asks to be written down, answered as far as the record goes.

Texts: Regulation (EU) 2016/679 (GDPR), articles 30 and 35; EDPB Opinion 28/2024 of 17 December 2024, on when a model is
anonymous; Regulation (EU) 2025/327 (EHDS), article 73; SATRE specification 2.0, statement 3.3.07; Regulation (EU)
2024/1689 (AI Act), article 12, for what it does not ask.
"""

from __future__ import annotations

from collections.abc import Iterator

from medsilo.privacy.dossier.draft import Draft, Topic
from medsilo.privacy.dossier.questionnaire import Answers
from medsilo.privacy.exposure import MEANING, Exposure
from medsilo.privacy.journal.records import Kind
from medsilo.privacy.pages.blocks import Block, Fact, Heading, Paragraph, Section
from medsilo.privacy.pages.wording import capital, grouped, last_part, listed, minute, number_of
from medsilo.privacy.report.model import BEFORE, Run, in_order
from medsilo.privacy.report.words import NAME, TELLING, consented

_ALL: Topic = ("record",)
_CONSENTS: Topic = ("kind", Kind.CONSENT)
_HANDED_ON = (Exposure.PEER_DERIVED, Exposure.PEER_MODELS, Exposure.CLASSIFIER_GRADIENT)


def sections(draft: Draft, answers: Answers) -> list[Section]:
    """All parts, in the order in which they are read."""
    parts = (
        ("article-30", "Record of processing activities (art. 30(1) GDPR)", _record_of_processing(draft, answers)),
        ("article-35", "Annex to the impact assessment (art. 35(7) GDPR)", _impact(draft, answers)),
        ("model", "Whether the model is anonymous (EDPB Opinion 28/2024)", _opinion(draft)),
        ("ehds", "Logs of a secure processing environment (art. 73 EHDS)", _logs(draft)),
        ("satre", "Outputs that nobody can check by eye (SATRE 2.0, 3.3.07)", _outputs(draft)),
    )
    found = []
    for anchor, title, blocks in parts:
        draft.part = anchor
        found.append(Section(anchor, title, list(blocks)))
    return found


def _record_of_processing(draft: Draft, answers: Answers) -> Iterator[Block]:
    report = draft.report
    yield Heading("(a) Controller, and data protection officer")
    yield draft.stated("Controller", answers.controller)
    yield draft.stated("Contact", answers.contact)
    yield draft.stated("Data protection officer", answers.data_protection_officer)
    yield draft.fact(
        f"In this record the hospital is `{report.party.uri}`; what it signs is signed with the audit key whose "
        f"fingerprint (SHA-256) is `{report.key_sha256}`.",
        ("kind", Kind.KEY),
    )
    yield Heading("(b) Purposes")
    yield draft.stated("Purpose", answers.purpose)
    yield from _what_was_trained(draft)
    yield Heading("(c) Data subjects, and categories of data")
    yield draft.stated("Data subjects", answers.data_subjects)
    yield draft.blank("Categories of personal data that the images and their labels hold (art. 9(1) GDPR among them)")
    yield from _data_sets(draft)
    yield from _kinds_that_left(draft)
    yield Heading("(d) Recipients")
    yield draft.stated("Legal persons that operate the parties below", answers.recipients)
    yield from _recipients(draft)
    yield Heading("(e) Third countries")
    yield draft.stated("Transfers to third countries, and their safeguards", answers.third_countries)
    yield Paragraph("The record holds names and certificates of parties, never a country: nothing is said of it here.")
    yield Heading("(f) Time limits for erasure")
    yield draft.stated("Retention", answers.retention)
    yield from _end_of_consent(draft)
    yield Heading("(g) Security measures (art. 32(1))")
    yield from _measures(draft)
    yield draft.blank("Other measures: access to the machine, backups, encryption of its disks, training of staff")


def _impact(draft: Draft, answers: Answers) -> Iterator[Block]:
    yield Paragraph(
        "Whether an assessment has to be made is the controller's to decide (art. 35(1) and (3)). This annex holds "
        "what the record can show for one."
    )
    yield Heading("(a) The processing, described")
    yield draft.stated("Purpose", answers.purpose)
    yield from _what_left(draft)
    yield Heading("(b) Necessity and proportionality")
    yield draft.stated("Legal basis", answers.legal_basis)
    yield draft.blank("Why the purpose cannot be reached with less: fewer images, fewer rounds, fewer kinds of content")
    yield from _consent(draft)
    yield Heading("(c) Risks to the persons concerned")
    yield from _risks(draft)
    yield draft.blank("Likelihood and severity of each risk above, as the hospital rates them")
    yield Heading("(d) Measures against them")
    yield from _measures(draft)
    yield from _decisions(draft)
    yield draft.blank("Risk that remains, and whether the supervisory authority is to be consulted (art. 36)")
    yield Heading("Advice and views")
    yield draft.blank("Advice of the data protection officer (art. 35(2))")
    yield draft.blank("Views of data subjects or their representatives, or why they were not sought (art. 35(9))")


def _opinion(draft: Draft) -> Iterator[Block]:
    yield Paragraph(
        "By the Opinion a model is anonymous if the likelihood is insignificant that personal data of those it was "
        "trained on are extracted from it, or obtained from it by queries, with all means reasonably likely to be "
        "used. That is assessed case by case. Nothing in this draft claims it: it lists what an authority may ask to "
        "see."
    )
    yield Heading("Design: data, and preparation")
    yield from _data_sets(draft)
    yield draft.blank(
        "How the images were chosen, cleaned, pseudonymised or reduced before they came into the data set"
    )
    yield Heading("Design: how it was trained")
    yield from _what_was_trained(draft)
    yield from _privacy(draft)
    yield Heading("Design: what the model gives out")
    yield draft.blank("Who can query the model, with what limits, and what it answers with")
    yield Heading("Analysis: who has checked it")
    yield _soundness(draft)
    yield draft.blank("Audits of code and model by others, with their reports")
    yield Heading("Tests: resistance to attacks")
    yield from _rehearsals(draft)
    yield draft.blank("Tests of the finished model: membership and attribute inference, inversion, reconstruction")
    yield Heading("Documentation")
    yield draft.blank(
        "Where the impact assessment, its advice and the documentation for those who deploy the model are"
    )


def _logs(draft: Draft) -> Iterator[Block]:
    report = draft.report
    yield Paragraph(
        "Art. 73(1)(e) asks health data access bodies for identifiable logs of access to and activities in their "
        "secure processing environment, and to keep logs of access for a year or longer. It applies where data are "
        "used under a data permit."
    )
    yield draft.blank("Whether this machine is such an environment, or part of one, and under which data permit")
    yield Heading("Activities on record")
    if report.first_time and report.last_time:
        yield draft.fact(
            f"The record runs from {minute(report.first_time)} to {minute(report.last_time)} UTC, in "
            f"{grouped(report.records)} entries.",
            _ALL,
            records=report.records,
        )
    for kind, what in _LOGGED.items():
        if count := draft.count("kind", kind):
            yield draft.fact(f"{capital(what)}: {grouped(count)}.", ("kind", kind), kind=str(kind), records=count)
    if draft.has("kind", Kind.MESSAGE):
        yield draft.fact(
            "Of every message the entry tells when, to or from whom, in which call, how many bytes of which kind of "
            "content, and their hash.",
            ("kind", Kind.MESSAGE),
        )
    yield _soundness(draft)
    yield Heading("Access")
    yield Paragraph("The record names parties and programs. Which person was at the machine it does not know.")
    yield draft.blank("Where the logs of persons' access to the machine are, and for how long they are kept")
    yield draft.blank("For how long this record is kept")


def _outputs(draft: Draft) -> Iterator[Block]:
    yield Paragraph(
        "The statement asks for a documented policy on the disclosure risks of outputs that cannot be checked by hand. "
        "A trained model is one: its numbers say nothing to a reader."
    )
    yield draft.blank("The policy: its name, version, and who has approved it")
    yield Heading("The rule that the machine enforced")
    yield from _consent(draft)
    yield from _decisions(draft)
    yield Heading("What left under it")
    yield from _what_left(draft)
    yield from _risks(draft)


_LOGGED = {
    Kind.MESSAGE: "messages sent and received",
    Kind.REFUSAL: "refusals",
    Kind.CONSENT: "consents, as they stood when the program began or the file changed",
    Kind.APPROVAL: "approvals of a plan by a person",
    Kind.WITHDRAWAL: "withdrawals, and early ends",
    Kind.RUN: "runs joined",
    Kind.LEDGER: "charges of the privacy budget",
    Kind.EGRESS: "counts by the kernel of what left",
    Kind.KEY_ROTATION: "changes of the audit key",
}


def _runs(draft: Draft) -> list[Run]:
    return [run for run in draft.report.runs if run.name != BEFORE]


def _what_was_trained(draft: Draft) -> Iterator[Fact]:
    for run in _runs(draft):
        if run.plan is None or not draft.has("run", run.name):
            continue
        model = run.plan["model"]["name"]
        rounds = f", in {number_of(run.rounds, 'round')} at most" if run.rounds is not None else ""
        yield draft.fact(
            f"Run {run.name} trained the model `{model}` by the method {run.method}{rounds}; its plan's hash (SHA-256) "
            f"is `{run.plan_sha256}`.",
            ("run", run.name),
            run=run.name,
            method=run.method,
            plan_sha256=run.plan_sha256,
        )
        if run.start is not None:
            yield draft.fact(run.start, ("run", run.name), run=run.name)


def _data_sets(draft: Draft) -> Iterator[Fact]:
    for digest in draft.data_sets:
        yield draft.fact(f"Data set of fingerprint `{digest}` was in use.", ("data", digest), data_sha256=digest)
    if draft.report.synthetic:
        yield draft.fact("Its images were generated by a program: they show no patient.", _CONSENTS)


def _what_left(draft: Draft) -> Iterator[Fact]:
    for run in draft.report.runs:
        if draft.has("sent", run.name):
            yield draft.fact(
                f"{run.occasion}: {run.statement}; {grouped(run.bytes_left)} bytes left{run.during}.",
                ("sent", run.name),
                run=run.name,
                bytes=run.bytes_left,
            )
    if not draft.has("sent"):
        yield draft.fact("Nothing has left: the record holds no message that was sent.", _ALL)


def _kinds_that_left(draft: Draft) -> Iterator[Fact]:
    for run in draft.report.runs:
        for exposure in in_order(run.left):
            if exposure in TELLING:
                flow = run.left[exposure]
                yield draft.fact(
                    f"{NAME[exposure]} (`{exposure}`: {MEANING[exposure].rstrip('.')}) left in {run.in_words}: "
                    f"{grouped(flow.bytes)} bytes (rounds: {run.spoken_rounds(flow.rounds)}).",
                    ("sent", run.name, exposure.value),
                    run=run.name,
                    exposure=exposure.value,
                    bytes=flow.bytes,
                )
    if not draft.report.foreign and draft.has("sent"):
        yield draft.fact(
            "No kind of content that left is an image, a single image's finding or a patient's name: every byte sent "
            "is of one of the kinds above, or of the protocol.",
            ("sent",),
            bytes=draft.report.bytes_left,
        )


def _recipients(draft: Draft) -> Iterator[Fact]:
    for peer in draft.report.peers.values():
        if not draft.has("peer", peer.identity):
            continue
        shown = listed([f"`{digest}`" for digest in peer.certificates])
        proof = f", which showed the certificate{'s' * (len(peer.certificates) > 1)} {shown} (SHA-256)" if shown else ""
        yield draft.fact(
            f"{grouped(peer.bytes_left)} bytes went to `{peer.identity}`{proof}.",
            ("peer", peer.identity),
            peer=peer.identity,
            bytes=peer.bytes_left,
        )
    for run in _runs(draft):
        back = [exposure for exposure in _HANDED_ON if exposure in run.came_back]
        if back:
            yield draft.fact(
                f"In run {run.name} came back, made of what other hospitals sent: "
                f"{listed([NAME[exposure].lower() for exposure in back])}. What this hospital sent reaches others "
                "alike.",
                *(("received", run.name, exposure.value) for exposure in back),
                run=run.name,
            )


def _end_of_consent(draft: Draft) -> Iterator[Fact]:
    if draft.report.consents and (last := draft.report.consents[-1]["consent"]).get("expires"):
        yield draft.fact(f"Nothing leaves after {last['expires']}: the consent ends on that day.", _CONSENTS)


def _consent(draft: Draft) -> Iterator[Fact]:
    report = draft.report
    if not report.consents:
        yield draft.fact("No consent of the hospital is on record.", _ALL)
        return
    last = report.consents[-1]
    yield draft.fact(
        f"The hospital's consent file, as it was in force from {minute(last['time'])} UTC. "
        + consented(last["consent"], withdrawn=report.withdrawn is not None),
        _CONSENTS,
        consent_sha256=last["consent"].get("sha256"),
    )
    if not draft.has("sent"):
        return
    if report.outside_consent:
        names = listed([NAME[exposure].lower() for exposure in in_order(report.outside_consent)])
        yield draft.fact(f"NOT covered by the consent in force, and sent: {names}.", ("sent",), _CONSENTS)
    else:
        yield draft.fact(
            "Each message that was sent was of kinds that the consent in force when it left lists.",
            ("sent",),
            _CONSENTS,
        )


def _decisions(draft: Draft) -> Iterator[Fact]:
    for kind, what in (
        (Kind.APPROVAL, "approval of a plan by a person"),
        (Kind.WITHDRAWAL, "withdrawal of consent, or early end of a run,"),
        (Kind.REFUSAL, "refusal of a message or a run"),
    ):
        if count := draft.count("kind", kind):
            yield draft.fact(f"On record, {what}: {grouped(count)}.", ("kind", kind), records=count)
        else:
            yield draft.fact(f"No {what} is on record.", _ALL, records=0)


def _risks(draft: Draft) -> Iterator[Block]:
    """What left, kind by kind; and after each, unmarked, what is known of such content wherever it comes from."""
    report = draft.report
    for exposure in in_order(report.telling()):
        runs = [run for run in report.runs if exposure in {*run.left, *run.came_back}]
        topics: list[Topic] = [
            topic
            for run in runs
            for topic in (("sent", run.name, exposure.value), ("received", run.name, exposure.value), ("run", run.name))
            if draft.has(*topic)
        ]
        how = "was measured on what left" if exposure == Exposure.DERIVED_ACCURACY else "left"
        yield draft.fact(
            f"{NAME[exposure]} (`{exposure}`) {how}, in {listed([run.in_words for run in runs])}.",
            *topics,
            exposure=exposure.value,
        )
        yield Paragraph(f"What that can tell: {report.risk(exposure)}")


def _measures(draft: Draft) -> Iterator[Fact]:
    report = draft.report
    if any(peer.certificates for peer in report.peers.values()) and not report.in_plain_text:
        names = listed([f"“{last_part(peer.identity)}”" for peer in report.peers.values() if peer.certificates])
        yield draft.fact(
            f"What was exchanged with {names} went over an encrypted connection, whose other end proved its name "
            "with a certificate.",
            *(("peer", peer.identity) for peer in report.peers.values() if peer.certificates),
        )
    elif report.in_plain_text:
        yield draft.fact("The connection was in plain text (allowed only within one machine).", ("kind", Kind.MESSAGE))
    yield from _kernel(draft)
    yield from _privacy(draft)
    for run in _runs(draft):
        if run.masked_sums and draft.has("roster", run.name):
            least = min(run.masked_sums.values())
            yield draft.fact(
                f"In run {run.name} updates left masked: the coordinator can read sums of {least} hospitals or more.",
                ("roster", run.name),
                run=run.name,
            )
    yield _soundness(draft)


def _kernel(draft: Draft) -> Iterator[Fact]:
    """What the kernel counted of a confined silo; it is of all runs."""
    report = draft.report
    if not report.egress:
        return
    sent, attributed = (sum(getattr(one, name) for one in report.egress) for name in ("sent", "attributed"))
    refused = sum(one.refused for one in report.egress)
    addresses = sorted({f"`{way.address}`" for one in report.egress for way in one.ways})
    yield draft.fact(
        f"The program had no way to any address but {listed(addresses)}. The kernel let {grouped(sent)} bytes out "
        f"to {'it' if len(addresses) == 1 else 'them'}, of which messages on record are {grouped(attributed)}; it "
        f"stopped {number_of(refused, 'attempt')} to reach another.",
        ("kind", Kind.EGRESS),
        kernel_bytes=sent,
        attributed=attributed,
        stopped=refused,
    )


def _privacy(draft: Draft) -> Iterator[Fact]:
    topic: Topic = ("charges",) if draft.has("charges") else ("kind", Kind.RUN)
    runs: Topic = ("kind", Kind.RUN)
    for statement in draft.report.privacy_statements():
        yield draft.fact(statement, *((topic, runs) if draft.has(*runs) else (_ALL,)))


def _soundness(draft: Draft) -> Fact:
    found = draft.report.verification
    verdict = "" if found.sound else "The record is NOT sound. "
    return draft.fact(verdict + " ".join(found.sentences), _ALL, sound=found.sound)


def _rehearsals(draft: Draft) -> Iterator[Fact]:
    for rehearsal in draft.report.rehearsals:
        yield draft.beside(str(rehearsal))
