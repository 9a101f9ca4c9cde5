"""``silo audit`` and ``coordinator audit``: verify evidence, export it, write the verifier out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medsilo.privacy.errors import ConfigurationError, JournalError, MedsiloError
from medsilo.privacy.files.state_folder import keep_private, writing_privately
from medsilo.privacy.identity.keys import load_audit_public
from medsilo.privacy.party.console import out, say
from medsilo.privacy.party.party import PartyConfig

if TYPE_CHECKING:
    from medsilo.privacy.audit.fork_proof import ForkProof
    from medsilo.privacy.audit.witnesses import Asked

SOUND, BROKEN, UNREADABLE = 0, 1, 2
_RECORD = re.compile(r"0|[1-9][0-9]{0,9}")
_ROUND = re.compile(r"[1-9][0-9]{0,8}")


def audit_app(read: Callable[[Path], PartyConfig]) -> typer.Typer:
    """The ``audit`` commands of a party whose configuration ``read`` reads."""
    app = typer.Typer(help="Check the evidence of what left, and hand it on.", no_args_is_help=True)
    _add_verify(app, read)
    _add_export(app, read)
    _add_show(app, read)
    _add_verifier(app)
    return app


def _add_verify(app: typer.Typer, read: Callable[[Path], PartyConfig]) -> None:
    @app.command()
    def verify(
        bundle: Annotated[
            Path | None,
            typer.Argument(help="A bundle, a journal's folder or a proof; by default this party's own journal."),
        ] = None,
        config: Annotated[Path | None, typer.Option("--config", "-c", help="This party's configuration.")] = None,
        peer: Annotated[
            Path | None, typer.Option("--peer", help="The other side's bundle, or another hospital's, to compare with.")
        ] = None,
        key: Annotated[
            Path | None, typer.Option("--key", help="The owner's public audit key (audit.pub), if you have it.")
        ] = None,
        proof: Annotated[
            Path | None, typer.Option("--proof", help="Write what --peer proves against a third party to this file.")
        ] = None,
        witness: Annotated[
            str | None,
            typer.Option(
                "--witness", help="Whose cosignatures it is to have: a witness's key, or a file with a policy."
            ),
        ] = None,
        seen: Annotated[
            list[Path] | None,
            typer.Option("--seen", help="With --witness: the last checkpoint that a witness has cosigned; repeat."),
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of sentences.")] = False,
    ) -> None:
        """Check that records are complete, unchanged, signed, and acknowledged by the other side.

        Needs no keys and no daemon. Ends with 0 if the evidence is sound, 1 if it is broken or something was found, 2
        if it cannot be read. Of a proof that `--proof` wrote: 0 if it holds.
        """
        own = read(config) if config is not None else None
        source = bundle or (own.journal if own else None)
        if source is None:
            raise ConfigurationError("what to verify: give a bundle, or --config for this party's own journal")
        if proof is not None and peer is None:
            raise ConfigurationError("--proof: give with --peer the evidence that the proof is to come of")
        trusted = key or (own.keys / "audit.pub" if own is not None and bundle is None else None)
        if seen and witness is None:
            raise ConfigurationError("--seen: give with --witness whose word it is")
        _verify(source, peer, trusted, proof, _asked(witness, seen or []), as_json=as_json)


def _add_export(app: typer.Typer, read: Callable[[Path], PartyConfig]) -> None:
    @app.command("export")
    def export_bundle(
        config: Annotated[Path, typer.Option("--config", "-c", help="This party's configuration.")],
        target: Annotated[Path | None, typer.Option("--out", help="The file to write (default: state folder).")] = None,
        run: Annotated[str | None, typer.Option("--run", help="Only this run.")] = None,
        rounds: Annotated[
            str | None, typer.Option("--rounds", help="Only these rounds, counted from 1: 3 or 2-5.")
        ] = None,
        crate: Annotated[
            Path | None,
            typer.Option("--ro-crate", help="Also make this folder an RO-Crate: bundle, schema, report, provenance."),
        ] = None,
    ) -> None:
        """Write the evidence as one JSON file that proves itself, for an auditor or the other side."""
        from medsilo.privacy.audit.bundle import Selection, export, sha256_of
        from medsilo.privacy.audit.crate import write_crate

        own = read(config)
        first, last = _rounds(rounds)
        select = Selection(run, first, last) if run is not None or rounds is not None else None
        path = target or own.state / f"{own.name}-evidence.json"
        try:
            # A crate is made as the user has it, like whatever the user names; what is in the state folder is not.
            with writing_privately() if target is None else nullcontext():
                if target is None:
                    keep_private(own.state)
                header = export(own.journal, path, select=select)
        except OSError as error:
            raise MedsiloError(f"{path}: cannot be written: {error.strerror}") from None
        if crate is not None:
            write_crate(crate, path, reports=own.state / "report")
        out.print(
            f"{header.count} of {header.size} signed records of {header.party}: {path}\nSHA-256 {sha256_of(path)}",
            markup=False,
            soft_wrap=True,
        )


def _asked(witness: str | None, seen: Sequence[Path]) -> Asked | None:
    """The witnesses that evidence is held against; raises ``ConfigurationError`` for what names or is none."""
    if witness is None:
        return None
    from medsilo.privacy.audit.witnesses import Asked
    from medsilo.privacy.identity.cosignature import CosignatureError
    from medsilo.privacy.witness.config import read_policy

    try:
        found = Asked(read_policy(witness), tuple(path.read_text(encoding="utf-8") for path in seen))
        found.words()
    except (OSError, UnicodeDecodeError, CosignatureError) as error:
        raise ConfigurationError(f"--seen: {error}") from None
    return found


def _add_show(app: typer.Typer, read: Callable[[Path], PartyConfig]) -> None:
    @app.command("show")
    def show(
        numbers: Annotated[
            list[str] | None, typer.Argument(help="Numbers of records, as a citation has them: 17, or 24-60.")
        ] = None,
        config: Annotated[Path | None, typer.Option("--config", "-c", help="This party's configuration.")] = None,
        bundle: Annotated[
            Path | None, typer.Option("--bundle", help="A bundle or a journal's folder, instead of the own journal.")
        ] = None,
        cited: Annotated[
            Path | None, typer.Option("--cited", help="Resolve every citation in this file (JSON) instead.")
        ] = None,
        receipts: Annotated[
            Path | None,
            typer.Option("--receipts", help="Write the records and their COSE receipts into this folder too."),
        ] = None,
    ) -> None:
        """Show records by their numbers, as they were signed, with the hash by which documents cite them.

        With `--cited`, ends with 1 if a citation does not hold. Whether the records are sound, `verify` says.
        """
        from medsilo.privacy.dossier.citations import check_citations, cite
        from medsilo.privacy.dossier.cose_receipts import write_receipts

        own = read(config) if config is not None else None
        source = bundle or (own.journal if own is not None else None)
        if source is None or bool(numbers) == (cited is not None):
            raise ConfigurationError("give --config or --bundle, and with it either numbers of records or --cited FILE")
        if cited is not None:
            held, wrong = check_citations(cited, source)
            for sentence in wrong:
                say(sentence)
            say(f"{held} of {held + len(wrong)} citations in {cited} hold.")
            raise typer.Exit(BROKEN if wrong else SOUND)
        citation, lines = cite(source, [_span(text) for text in numbers or ()])
        for line in lines:
            typer.echo(line.decode())
        if receipts is not None:
            if own is None or bundle is not None:
                raise ConfigurationError("--receipts: give --config alone, as the owner's key signs them")
            wanted = [number for first, last in citation.spans for number in range(first, last + 1)]
            write_receipts(own.journal, own.keys / "audit.key", wanted, receipts)
        say(f"{citation.count} of its records: {citation.numbers}\nSHA-256 {citation.sha256}")


def _span(text: str) -> tuple[int, int]:
    first, dash, last = text.rstrip(",").replace("–", "-").partition("-")
    if _RECORD.fullmatch(first) is None or _RECORD.fullmatch(last if dash else first) is None:
        raise ConfigurationError(f"{text}: should be the number of a record, or a range of such, as 17 or 24-60")
    begin, end = int(first), int(last if dash else first)
    if begin > end:
        raise ConfigurationError(f"{text}: ends before it begins")
    return begin, end


def _add_verifier(app: typer.Typer) -> None:
    @app.command("verifier")
    def write_verifier(
        target: Annotated[Path, typer.Argument(help="The HTML file to write.")],
    ) -> None:
        """Write the verifier as one HTML file: it checks bundles in a browser, without a network or an installation."""
        from medsilo.privacy.audit.verifier_page import verifier_page

        try:
            target.write_bytes(verifier_page())
        except OSError as error:
            raise MedsiloError(f"{target}: cannot be written: {error.strerror}") from None
        out.print(f"{target}: open it in a browser, and give it a bundle.", markup=False, soft_wrap=True)


def _verify(
    source: Path, peer: Path | None, key: Path | None, proof: Path | None, asked: Asked | None, *, as_json: bool
) -> None:
    """Verifies evidence or a proof, says what was found, and ends with its code."""
    # What reads evidence takes a while to load; other commands need none.
    from medsilo.privacy.audit.bundle import UnreadableError
    from medsilo.privacy.audit.findings import Verification
    from medsilo.privacy.audit.fork_proof import read_fork_proof
    from medsilo.privacy.audit.verification import verify_evidence

    try:
        if (claim := read_fork_proof(source)) is not None:
            if peer is not None:
                raise ConfigurationError(f"{source}: is a proof, which is checked by itself, without --peer")
            _check_proof(claim, source, load_audit_public(key) if key else None, as_json=as_json)
            return
        result = verify_evidence(source, peer=peer, key=load_audit_public(key) if key else None, witnesses=asked)
    except UnreadableError as error:
        unread = Verification(str(source), problem=str(error))
        _say(as_json, {"sound": False, "readable": False, **asdict(unread)}, [str(error)])
        raise typer.Exit(UNREADABLE) from None
    content = {"sound": result.sound, "readable": True, **asdict(result)}
    lines = [str(source), *result.sentences()]
    if proof is not None:
        if result.proof is None:
            lines.append("Nothing is proven against a third party: no proof was written.")
        else:
            _write_proof(result.proof, proof)
            lines.append(f"Proof written: {proof}. Anyone checks it with `audit verify {proof.name}`.")
    _say(as_json, content, lines)
    raise typer.Exit(SOUND if result.sound else BROKEN)


def _check_proof(claim: ForkProof, source: Path, key: bytes | None, *, as_json: bool) -> None:
    """Says whether a proof holds; ends with 1 if it does not."""
    try:
        found = claim.check(key)
    except JournalError as error:
        _say(as_json, {"holds": False, "problem": str(error)}, [f"{source}: this proves NOTHING: {error}."])
        raise typer.Exit(BROKEN) from None
    said = [
        f"PROOF: {found.sentence()}.",
        f"Shown to {' and to '.join(v.shown_to for v in claim.views)}, says the file.",
    ]
    if key is None:
        said.append("The proof is as good as that the key is the party's: hold it against its audit.pub (--key).")
    _say(as_json, {"holds": True, **asdict(found), "shown_to": [v.shown_to for v in claim.views]}, [str(source), *said])


def _write_proof(content: dict[str, Any], path: Path) -> None:
    from medsilo.privacy.audit.fork_proof import ForkProof

    try:
        ForkProof.model_validate(content).write(path)
    except OSError as error:
        raise MedsiloError(f"{path}: cannot be written: {error.strerror}") from None


def _rounds(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    first, dash, last = text.partition("-")
    if _ROUND.fullmatch(first) is None or _ROUND.fullmatch(last if dash else first) is None:
        raise ConfigurationError(f"--rounds {text}: should be a round or a range of rounds from 1, such as 3 or 2-5")
    begin, end = int(first), int(last if dash else first)
    if begin > end:
        raise ConfigurationError(f"--rounds {text}: ends before it begins")
    return begin - 1, end - 1


def _say(as_json: bool, content: dict[str, object], lines: list[str]) -> None:
    if as_json:
        typer.echo(json.dumps(content, indent=2))
        return
    for line in lines:
        # Evidence is somebody else's: nothing in it may steer the terminal.
        shown = "".join(sign if sign.isprintable() else "�" for sign in line)
        say(shown)
