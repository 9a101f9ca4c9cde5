"""Errors that a user sees, each with the exit code of the command that it ends.

Every message says what is wrong, where, and the way out. ``docs/exit-codes.md`` has a line for each code.
"""

from __future__ import annotations


class MedsiloError(Exception):
    """Base of every error that is the user's to mend; anything else is a defect and exits with 1.

    >>> from medsilo import MedsiloError, load_model
    >>> try:
    ...     load_model("nowhere")
    ... except MedsiloError as error:
    ...     print(error)
    nowhere...
    """

    exit_code = 1
    recorded = False
    """Whether the journal holds it already, or the other side's does."""


class ConfigurationError(MedsiloError):
    """A configuration file, option or plan that cannot be used as it stands."""

    exit_code = 2


class DataError(MedsiloError):
    """A data set, shard or image file that is missing, unreadable or does not fit the model."""

    exit_code = 3


class ConsentError(MedsiloError):
    """The silo's consent does not cover what a run asks for, or what a message would expose."""

    exit_code = 4


class IdentityError(MedsiloError):
    """A key, certificate or name that is missing, expired, too widely readable or somebody else's."""

    exit_code = 5


class ClockError(IdentityError):
    """A certificate is not valid yet, by this machine's clock: most likely that is wrong."""

    exit_code = 16


class RefusedError(MedsiloError):
    """The other side refused a message, or this side refused one of theirs."""

    exit_code = 6


class JournalError(MedsiloError):
    """The journal cannot be continued: it is damaged, or another process has it open."""

    exit_code = 7


class JournalInUseError(JournalError):
    """Another process has the journal open."""


class TrainingError(MedsiloError):
    """Local training failed (for example, it diverged to NaN); nothing of that round was sent."""

    exit_code = 8


class ReceiptError(MedsiloError):
    """The other side's word on what was exchanged is missing, contradicts the own journal, or does not continue the
    journal that it showed before."""

    exit_code = 9


class BudgetError(MedsiloError):
    """The privacy budget does not cover what is asked for, or the ledger that says so cannot be relied on; nothing was
    charged and nothing of it was sent."""

    exit_code = 10


class StoreError(MedsiloError):
    """The coordinator's database does not answer; nothing is lost."""

    exit_code = 12


class LeaseLostError(StoreError):
    """Another coordinator has taken over; this one can change nothing more."""


class DiskError(MedsiloError):
    """The disk is full, read-only or failing. Nothing that was kept is lost, and nothing is sent or accepted that could
    not be kept; the same command goes on once it can."""

    exit_code = 13
    passes = False
    """Whether it may be over without anybody's doing: others hold too many connections for a while."""


class NotReadyError(MedsiloError):
    """``doctor`` found something that has to be mended."""

    exit_code = 14


class UnreachableError(MedsiloError):
    """The coordinator cannot be reached; nothing was done that the same command would not do again."""

    exit_code = 15


class RehearsalError(MedsiloError):
    """A rehearsal has refuted the privacy that a run promises; nothing of the run was sent by it."""

    exit_code = 11


class LateError(MedsiloError):
    """An update for a round that has ended without it; the silo goes on with its next task."""
