"""Bundles: the same journal gives the same bytes, and any stretch of it proves its place."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rocrate.rocrate import ROCrate

from medsilo.privacy.audit.bundle import NothingFitsError, Selection, export, open_evidence, sha256_of
from medsilo.privacy.audit.crate import write_crate
from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.errors import ConfigurationError, JournalError
from medsilo.privacy.journal.journal import CHECKPOINTS, RECORDS
from tests.support.evidence.exchanging import COORDINATOR, SILO, Exchange, meet, two_rounds
from tests.support.evidence.plain_journal import PUBLIC, open_journal, plain_record


def numbered(folder: Path, records: int) -> Path:
    """A journal of which record n belongs to round n."""
    with open_journal(folder) as journal:
        journal.append([plain_record(number, run="r", round=number) for number in range(records)])
    return folder


@pytest.mark.parametrize("records", [1, 2, 3, 7, 8, 9, 33])
def test_every_stretch_proves_its_place(tmp_path: Path, records: int) -> None:
    """Single records, the first, the last, the whole, all but one, and everything between."""
    folder = numbered(tmp_path / "journal", records)
    path = tmp_path / "bundle.json"
    if records > 9:
        spans = [(0, 0), (records - 1, records - 1), (0, records - 1), (1, records - 1), (0, records - 2), (15, 17)]
    else:
        spans = [(first, last) for first in range(records) for last in range(first, records)]
    for first, last in spans:
        header = export(folder, path, select=Selection("r", first, last))
        assert (header.first, header.count, header.size) == (first, last - first + 1, records)
        assert header.whole == (last - first + 1 == records)
        found = verify_evidence(path, key=PUBLIC)
        assert found.sound, found.problem
        assert found.records == last - first + 1
        assert found.whole == header.whole
        lines = list(open_evidence(path).lines)
        assert [json.loads(line)["index"] for line in lines] == list(range(first, last + 1))


def test_the_same_journal_gives_the_same_bytes(tmp_path: Path) -> None:
    exchange = meet(tmp_path)
    exchange.rounds([0, 1])
    exchange.silo.journal.checkpoint()
    folder = exchange.silo.folder
    for select in (None, Selection(first_round=1)):
        hashes = set()
        for number in range(3):
            path = tmp_path / f"{number}.json"
            export(folder, path, select=select)
            hashes.add(sha256_of(path))
        assert len(hashes) == 1
    # What comes later, or is not signed yet, changes nothing of an earlier bundle's records.
    before = list(open_evidence(exchange.silo.bundle(tmp_path / "before.json")).lines)
    exchange.rounds([2])
    after = list(open_evidence(exchange.silo.bundle(tmp_path / "after.json")).lines)
    assert after[: len(before)] == before


def test_a_bundle_is_one_json_document_in_lines(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "journal", 5)
    export(folder, tmp_path / "bundle.json")
    content = json.loads((tmp_path / "bundle.json").read_bytes())
    assert [record["round"] for record in content["records"]] == [0, 1, 2, 3, 4]
    assert (tmp_path / "bundle.json").read_bytes().splitlines()[3:-1] == [
        line + (b"," if number < 4 else b"") for number, line in enumerate((folder / RECORDS).read_bytes().splitlines())
    ]


def test_nothing_is_exported_of_no_journal_or_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "bundle.json"
    with pytest.raises(JournalError, match="no signed journal"):
        export(tmp_path / "none", path)
    folder = numbered(tmp_path / "journal", 5)
    with pytest.raises(NothingFitsError, match="that run and those rounds"):
        export(folder, path, select=Selection("other"))
    original = (folder / RECORDS).read_bytes()
    for damaged in (
        original.replace(b'"round":3', b'"round":4'),
        original.replace(b'"round":3', b"round:3"),
        original[: len(original) // 2],
        b"[]\n" + original,
        b"",
    ):
        (folder / RECORDS).write_bytes(damaged)
        for select in (None, Selection("r", 1, 2)):
            with pytest.raises((JournalError, NothingFitsError)):
                export(folder, path, select=select)
            assert not path.exists()
            assert not list(tmp_path.glob(".*"))
    (folder / CHECKPOINTS).write_bytes(b"{}\n")
    with pytest.raises(JournalError):
        export(folder, path)


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Exchange:
    return two_rounds(tmp_path_factory.mktemp("crate"))


def test_a_crate_says_who_did_what_and_its_hashes_fit(exchange: Exchange, tmp_path: Path) -> None:
    bundle = exchange.silo.bundle(tmp_path / "evidence.json")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.html").write_text("<p>what left</p>")
    folder = write_crate(tmp_path / "crate", bundle, reports=tmp_path / "report")
    write_crate(folder, bundle, reports=tmp_path / "report")  # a crate may be made anew in its place

    crate = ROCrate(folder)
    files = [entity for entity in crate.get_entities() if "File" in entity.type]
    assert {entity.id for entity in files} == {"evidence.json", "bundle.schema.json", "report.html"}
    for entity in files:
        content = (folder / entity.id).read_bytes()
        assert entity["sha256"] == hashlib.sha256(content).hexdigest()
        assert int(entity["contentSize"]) == len(content)
        assert "prov:Entity" in entity.type
    assert crate.mainEntity.id == "evidence.json"
    assert crate.mainEntity["conformsTo"].id == "bundle.schema.json"
    assert crate.mainEntity["prov:wasAttributedTo"].id == SILO
    agents = {entity.id: entity for entity in crate.get_entities() if "prov:Agent" in entity.type}
    assert set(agents) == {SILO, COORDINATOR}
    for party, identity in ((exchange.silo, SILO), (exchange.coordinator, COORDINATOR)):
        (key,) = agents[identity]["identifier"]
        assert key["value"] == hashlib.sha256(party.public).hexdigest()
    activities = {entity.id: entity for entity in crate.get_entities() if "prov:Activity" in entity.type}
    assert set(activities) == {"#run-run1", "#run-run1-round-1", "#run-run1-round-2"}
    first = activities["#run-run1-round-1"]
    assert {agent.id for agent in first["prov:wasAssociatedWith"]} == {SILO, COORDINATOR}
    assert "bytes of MODEL_PARAMETERS_EXTRACTOR" in first["description"]
    assert first["prov:startedAtTime"] <= first["prov:endedAtTime"]
    context: Any = json.loads((folder / "ro-crate-metadata.json").read_text())["@context"]
    assert {"prov": "http://www.w3.org/ns/prov#"} in context
    assert verify_evidence(folder / "evidence.json").sound


def test_a_crate_of_a_stretch(exchange: Exchange, tmp_path: Path) -> None:
    path = tmp_path / "stretch.json"
    export(exchange.silo.folder, path, select=Selection(first_round=1, last_round=1))
    crate = ROCrate(write_crate(tmp_path / "crate", path))
    (owner,) = [entity for entity in crate.get_entities() if entity.id == SILO]
    (key,) = owner["identifier"]
    assert key["value"] == hashlib.sha256(exchange.silo.public).hexdigest()


def test_a_crate_never_lands_among_other_files(exchange: Exchange, tmp_path: Path) -> None:
    bundle = exchange.silo.bundle(tmp_path / "evidence.json")
    with pytest.raises(ConfigurationError, match="holds other files"):
        write_crate(tmp_path, bundle)
    with pytest.raises(ConfigurationError, match="made of a bundle"):
        write_crate(tmp_path / "crate", exchange.silo.folder)


def test_without_the_package_the_error_names_the_extra(
    exchange: Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = exchange.silo.bundle(tmp_path / "evidence.json")
    for name in [name for name in sys.modules if name.partition(".")[0] == "rocrate"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rocrate", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'medsilo\[crate\]'"):
        write_crate(tmp_path / "crate", bundle)
