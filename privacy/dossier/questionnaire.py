"""What only the hospital can say, asked once and kept beside its configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml
from pydantic import Field

from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.files.configuration import StrictModel, load
from medsilo.privacy.files.durable import write_atomically


class Answers(StrictModel):
    """``HOSPITAL.dossier.yaml``: the hospital's own statements. What is left out or empty becomes a blank to fill in.

    ``controller``: name and address of who decides on purposes and means, and of joint controllers. ``contact``: how
    to reach it. ``data_protection_officer``: name and contact. ``purpose``: what the model is trained for.
    ``legal_basis``: the basis in art. 6 and the exception in art. 9(2) GDPR that the hospital relies on.
    ``data_subjects``: whose images, of which department and years. ``recipients``: the legal persons behind the
    federation's parties. ``retention``: how long images, models and this record are kept. ``third_countries``:
    transfers outside the EEA and their safeguards, or none.
    """

    controller: str = Field(default="", title="Controller, with address (and joint controllers)")
    contact: str = Field(default="", title="Contact of the controller")
    data_protection_officer: str = Field(default="", title="Data protection officer, with contact")
    purpose: str = Field(default="", title="Purpose of the training")
    legal_basis: str = Field(default="", title="Legal basis (art. 6, and art. 9(2) GDPR), as the hospital states it")
    data_subjects: str = Field(default="", title="Whose images: patients of which department, which years")
    recipients: str = Field(default="", title="Who operates the coordinator and the other hospitals' silos")
    retention: str = Field(default="", title="How long images, models and records are kept")
    third_countries: str = Field(default="", title="Transfers to third countries and their safeguards, or none")


def read_answers(path: Path) -> Answers:
    """Raises ``ConfigurationError`` for a file that is missing or wrong."""
    return load(path, Answers)


def ask_answers(ask: Callable[[str], str], path: Path) -> Answers:
    """Asks for every answer and keeps them in the file; an empty answer is kept as a blank.

    Raises ``ConfigurationError`` if the file cannot be written.
    """
    found = {name: ask(str(of.title)).strip() for name, of in Answers.model_fields.items()}
    answers = Answers.model_validate(found)
    text = yaml.safe_dump(answers.model_dump(), sort_keys=False, allow_unicode=True, width=100)
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written ({error.strerror}); give another with --answers") from None
    return answers
