"""A dossier states no fact without the records that prove it, and what it cannot know is a blank."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from medsilo.privacy.audit.bundle import export
from medsilo.privacy.dossier.citations import check_citations, cite
from medsilo.privacy.dossier.draft import Draft
from medsilo.privacy.dossier.questionnaire import Answers, ask_answers, read_answers
from medsilo.privacy.dossier.writing import make_document, write_dossier
from medsilo.privacy.errors import ConfigurationError, JournalError
from medsilo.privacy.journal.journal import read_records
from medsilo.privacy.journal.records import ApprovalRecord, RefusalRecord
from medsilo.privacy.journal.segments import RECORDS
from medsilo.privacy.pages.blocks import Fact, texts_of
from tests.support.evidence.recorded import COORDINATOR, MODELS, Recorded, ordinary

ANSWERS = Answers(controller="Clinic | North <b>", purpose="grading tissue")


@pytest.fixture
def recorded(tmp_path: Path) -> Any:
    with ordinary(tmp_path / "journal") as found:
        found.run("autumn", method="fedavg")
        found.upload("autumn", 0, MODELS)
        found.door.note(RefusalRecord(run="autumn", peer=COORDINATOR.uri, rpc="GetTask", reason="no"))
        found.door.note(ApprovalRecord(run="spring", plan_sha256="12" * 32))
        yield found


def written(recorded: Recorded, answers: Answers = ANSWERS, **options: Any) -> tuple[dict[str, Any], Path]:
    folder = recorded.folder.parent / "dossier"
    write_dossier(Draft(recorded.report(**options), recorded.folder), answers, folder)
    return json.loads((folder / "dossier.json").read_bytes()), folder


def numbers(citation: dict[str, Any]) -> list[int]:
    return [number for first, last in citation["records"] for number in range(first, last + 1)]


class TestFacts:
    def test_every_fact_names_records_and_nothing_else_does(self, recorded: Recorded) -> None:
        document, _ = written(recorded)
        for statement in document["statements"]:
            assert bool(statement["citations"]) == (statement["source"] == "record"), statement
        assert {one["source"] for one in document["statements"]} == {"record", "hospital", "blank"}

    def test_hashes_follow_from_the_journals_lines_alone(self, recorded: Recorded) -> None:
        document, _ = written(recorded)
        lines = (recorded.folder / RECORDS).read_bytes().splitlines()
        leaves = [hashlib.sha256(b"\x00" + line).digest() for line in lines]
        for citation in document["citations"].values():
            of = [leaves[number] for number in numbers(citation)]
            expected = of[0].hex() if len(of) == 1 else hashlib.sha256(b"".join(of)).hexdigest()
            assert citation["sha256"] == expected

    def test_figures_follow_from_the_records_that_are_cited_and_from_no_others(self, recorded: Recorded) -> None:
        document, _ = written(recorded)
        records = list(read_records(recorded.folder))
        checked = 0
        for statement in document["statements"]:
            figures = statement.get("figures", {})
            if "bytes" not in figures:
                continue
            (name,) = statement["citations"]
            cited = [records[number] for number in numbers(document["citations"][name])]
            sent = [record for record in cited if record["direction"] == "sent"]
            if "exposure" in figures:
                found = sum(record["classes"][figures["exposure"]] for record in sent)
                assert all((record["run"] or "") == figures["run"] for record in sent)
            else:
                found = sum(record["length"] for record in sent)
            assert found == figures["bytes"] > 0, statement
            checked += 1
        assert checked >= 8

    def test_counts_are_those_of_the_records_cited(self, recorded: Recorded) -> None:
        document, _ = written(recorded)
        counted = [one for one in document["statements"] if one.get("figures", {}).get("records")]
        for statement in counted:
            (name,) = statement["citations"]
            assert len(numbers(document["citations"][name])) == statement["figures"]["records"]
        assert len(counted) >= 8

    def test_a_fact_without_records_cannot_be_written(self, recorded: Recorded) -> None:
        draft = Draft(recorded.report(), recorded.folder)
        with pytest.raises(KeyError):
            draft.fact("All is well.")
        with pytest.raises(KeyError):
            draft.fact("A roster was made.", ("roster", "spring"))

    def test_limited_to_a_run_it_cites_messages_of_no_other(self, recorded: Recorded) -> None:
        document, _ = written(recorded, run="autumn")
        records = list(read_records(recorded.folder))
        for statement in document["statements"]:
            if "bytes" in statement.get("figures", {}):
                cited = [records[n] for name in statement["citations"] for n in numbers(document["citations"][name])]
                assert {record["run"] for record in cited} == {"autumn"}

    def test_a_record_that_is_not_sound_is_said_first_and_beside_the_facts(self, recorded: Recorded) -> None:
        recorded.journal.checkpoint()
        path = recorded.folder / RECORDS
        path.write_bytes(path.read_bytes().replace(b'"length":27', b'"length":28'))
        document, folder = written(recorded, signed=False)
        assert not document["sound"]
        assert "NOT sound" in (folder / "dossier.html").read_text().split("In one minute")[0]

    def test_a_journal_that_is_another_than_the_reports_is_refused(self, recorded: Recorded) -> None:
        report = recorded.report()
        path = recorded.folder / RECORDS
        path.write_bytes(path.read_bytes().replace(b'"length":27', b'"length":28'))
        with pytest.raises(JournalError, match="were changed"):
            Draft(report, recorded.folder)


class TestBlanks:
    def test_what_the_hospital_has_not_stated_is_a_blank(self, recorded: Recorded) -> None:
        stated = {one["text"] for one in written(recorded)[0]["statements"] if one["source"] == "hospital"}
        assert stated == {"Controller: Clinic | North <b>", "Purpose: grading tissue"}
        all_blank = written(recorded, Answers())[0]["statements"]
        assert not [one for one in all_blank if one["source"] == "hospital"]
        for what in ("Controller", "Legal basis", "Retention", "Transfers to third countries, and their safeguards"):
            assert [one["source"] for one in all_blank if one["text"] == what] == ["blank"]

    def test_blanks_are_seen_and_counted(self, recorded: Recorded) -> None:
        draft = Draft(recorded.report(), recorded.folder)
        document = make_document(draft, ANSWERS)
        blanks = [b for s in document.sections for b in s.blocks if isinstance(b, Fact) and b.source == "blank"]
        assert document.answers[0].verdict == f"{len(blanks)} blanks to be filled in"
        page = written(recorded)[1] / "dossier.html"
        assert page.read_text().count('class="fact blank"') == len(blanks)

    def test_it_says_that_no_text_asks_for_evidence_against_tampering(self, recorded: Recorded) -> None:
        text = " ".join(texts_of(make_document(Draft(recorded.report(), recorded.folder), ANSWERS).to_data()))
        assert "None of the texts above asks for hashes, signatures or a record that shows tampering." in text


class TestFiles:
    def test_every_link_of_the_page_leads_somewhere_and_nothing_the_hospital_writes_is_markup(
        self, recorded: Recorded
    ) -> None:
        _, folder = written(recorded)
        page = (folder / "dossier.html").read_text()
        links = {part.split('"')[0] for part in page.split('class="cite" href="#')[1:]}
        assert links
        assert all(f'id="{link}"' in page for link in links)
        assert "<script" not in page
        assert "<b>" not in page
        assert "Clinic \\| North \\<b\\>" in (folder / "dossier.md").read_text()

    def test_the_same_journal_gives_the_same_files(self, recorded: Recorded) -> None:
        _, folder = written(recorded)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        written(recorded)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert sorted(before) == ["dossier.html", "dossier.json", "dossier.md"]


class TestResolving:
    def test_citations_resolve_in_journal_and_bundle(self, recorded: Recorded, tmp_path: Path) -> None:
        document, folder = written(recorded)
        export(recorded.folder, tmp_path / "bundle.json")
        for evidence in (recorded.folder, tmp_path / "bundle.json"):
            assert check_citations(folder / "dossier.json", evidence) == (len(document["citations"]), [])

    def test_a_record_that_was_changed_is_found_by_each_citation_of_it(self, recorded: Recorded) -> None:
        document, folder = written(recorded)
        path = recorded.folder / RECORDS
        path.write_bytes(path.read_bytes().replace(b'"length":27', b'"length":28'))
        changed = next(
            index for index, record in enumerate(read_records(recorded.folder)) if record.get("length") == 28
        )
        expected = sum(changed in numbers(citation) for citation in document["citations"].values())
        held, wrong = check_citations(folder / "dossier.json", recorded.folder)
        assert (held, len(wrong)) == (len(document["citations"]) - expected, expected)
        assert expected > 0

    def test_records_are_shown_with_the_hash_that_documents_cite(self, recorded: Recorded) -> None:
        document, _ = written(recorded)
        for citation in document["citations"].values():
            found, lines = cite(recorded.folder, [(first, last) for first, last in citation["records"]])
            assert found.sha256 == citation["sha256"]
            assert [json.loads(line)["index"] for line in lines] == numbers(citation)
        with pytest.raises(ConfigurationError, match="no record 999"):
            cite(recorded.folder, [(999, 999)])


class TestQuestions:
    def test_answers_are_asked_once_and_kept(self, tmp_path: Path) -> None:
        asked: list[str] = []

        def ask(what: str) -> str:
            asked.append(what)
            return " zum Teil: „ja“ " if len(asked) == 1 else ""

        kept = tmp_path / "h.dossier.yaml"
        answers = ask_answers(ask, kept)
        assert len(asked) == len(Answers.model_fields)
        assert answers == read_answers(kept) == Answers(controller="zum Teil: „ja“")

    def test_a_key_that_is_unknown_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "h.dossier.yaml").write_text("controler: X\n")
        with pytest.raises(ConfigurationError, match="controler"):
            read_answers(tmp_path / "h.dossier.yaml")
