"""Forms that auditors know: each is what its standard says, and leads back to the journal's records."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import scitt_cose
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from medsilo.privacy.audit.bundle import sha256_of
from medsilo.privacy.dossier.citations import check_citations
from medsilo.privacy.dossier.cose_receipts import write_receipts
from medsilo.privacy.dossier.draft import Draft
from medsilo.privacy.dossier.model_bom import make_bom
from medsilo.privacy.errors import ConfigurationError, JournalError
from medsilo.privacy.journal.checkpoint import read_note
from medsilo.privacy.journal.journal import last_checkpoint, read_lines
from medsilo.privacy.journal.segments import RECORDS
from tests.support.evidence.recorded import Recorded, ordinary

PUBLIC, PEM = serialization.PublicFormat.SubjectPublicKeyInfo, serialization.Encoding.PEM


@pytest.fixture
def recorded(tmp_path: Path) -> Any:
    with ordinary(tmp_path / "journal") as found:
        yield found


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """The key with which ``Recorded`` signs."""
    path = tmp_path / "audit.key"
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(Ed25519PrivateKey.from_private_bytes(bytes(32)).private_bytes(PEM, form, plain))
    path.chmod(0o600)
    return path


def public_of(key: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(key).public_key().public_bytes(PEM, PUBLIC)


class TestBillOfMaterials:
    def test_it_is_cyclonedx_and_each_citation_in_it_holds(self, recorded: Recorded, tmp_path: Path) -> None:
        draft = Draft(recorded.report(), recorded.folder)
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        models = {"spring": tmp_path / "model.safetensors"}
        made = make_bom(draft, models, version="0.1.0")
        assert made == make_bom(draft, models, version="0.1.0")
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(made.decode()) is None
        (tmp_path / "bom.json").write_bytes(made)
        assert check_citations(tmp_path / "bom.json", recorded.folder) == (3, [])
        components = {one["type"]: one for one in json.loads(made)["components"]}
        assert set(components) == {"data", "machine-learning-model"}
        model = components["machine-learning-model"]
        assert model["version"] == "spring"
        assert model["hashes"] == [{"alg": "SHA-256", "content": sha256_of(models["spring"])}]

    def test_a_model_that_is_not_there_has_no_hash(self, recorded: Recorded) -> None:
        components = json.loads(make_bom(Draft(recorded.report(), recorded.folder), {}, version="0"))["components"]
        assert not [one for one in components if "hashes" in one]


class TestCoseReceipts:
    def test_another_implementation_accepts_each_receipt_and_no_other_record(
        self, recorded: Recorded, key: Path, tmp_path: Path
    ) -> None:
        recorded.journal.checkpoint()
        size = read_note(last_checkpoint(recorded.folder) or "").size
        write_receipts(recorded.folder, key, range(size), tmp_path / "out")
        lines = list(read_lines(recorded.folder))
        for number in range(size):
            line = (tmp_path / "out" / f"record-{number}.json").read_bytes()
            assert line == lines[number]
            receipt = (tmp_path / "out" / f"record-{number}.cose").read_bytes()
            for entry, by, holds in (
                (line, bytes(32), True),
                (lines[number - 1], bytes(32), False),
                (line, b"\x01" * 32, False),
            ):
                result = scitt_cose.verify_receipt(
                    receipt, leaf_entry_hex=entry.hex(), log_public_key_pem=public_of(by)
                )
                assert result.ok == holds, (number, result)

    def test_the_receipts_root_is_that_of_the_signed_checkpoint(
        self, recorded: Recorded, key: Path, tmp_path: Path
    ) -> None:
        recorded.journal.checkpoint()
        path = recorded.folder / RECORDS
        path.write_bytes(path.read_bytes().replace(b'"length":27', b'"length":28'))
        with pytest.raises(JournalError, match="not what was signed"):
            write_receipts(recorded.folder, key, [0], tmp_path / "out")

    def test_a_record_that_is_not_signed_for_yet_gets_none(self, recorded: Recorded, key: Path, tmp_path: Path) -> None:
        recorded.journal.checkpoint()
        size = read_note(last_checkpoint(recorded.folder) or "").size
        recorded.ask()
        with pytest.raises(ConfigurationError, match="not under the last signed checkpoint"):
            write_receipts(recorded.folder, key, [size], tmp_path / "out")


@pytest.mark.parametrize(("package", "extra"), [("cyclonedx", "bom"), ("scitt_cose", "cose")])
def test_a_missing_package_is_named_with_its_extra(
    package: str, extra: str, recorded: Recorded, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = importlib.import_module

    def without(name: str) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return load(name)

    for module in ("model_bom", "cose_receipts"):
        monkeypatch.setattr(f"medsilo.privacy.dossier.{module}.import_module", without)
    forms = {
        "bom": lambda: make_bom(Draft(recorded.report(), recorded.folder), {}, version="0"),
        "cose": lambda: write_receipts(recorded.folder, key, [0], recorded.folder / "out"),
    }
    with pytest.raises(ConfigurationError, match=rf"medsilo\[{extra}\]"):
        forms[extra]()
