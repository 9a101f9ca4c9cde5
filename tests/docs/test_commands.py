"""What the pages tell users to type exists, and does what its page says."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from PIL import Image
from typer.main import get_command

from medsilo.algorithms.datasets import ImageDataset, save_npz
from medsilo.coordinator.cli import app as coordinator_app
from medsilo.privacy.audit.fork_proof import ForkProof, View
from medsilo.privacy.identity.keys import load_audit_key, load_audit_public
from medsilo.privacy.journal.checkpoint import Checkpoint
from medsilo.privacy.journal.merkle import EMPTY_ROOT
from medsilo.silo.cli import app as silo_app
from medsilo.silo.commands.shard import shard
from medsilo.silo.data.settings import PracticalGroups
from medsilo.silo.data.sharding import cut
from medsilo.silo.data.synthetic import generate_tissue
from medsilo.simulation.cli import app as simulation_app
from medsilo.simulation.experiment import ExperimentConfig

ROOT = Path(__file__).parents[2]

from tests.support.daemons.forked import Forked  # noqa: E402
from tests.support.runs.federation import PATIENCE, Federation, free_port  # noqa: E402

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("silo", "coordinator", "simulation", "make", "python", "python3", "sudo", "./setup.sh")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXIT_CODE = re.compile(r"# ends with (\d+)$")

NOT_RUN = {
    "./setup.sh": "makes the environment that this test runs in",
    "make demo": "starts daemons as simulation/demo.py does, for minutes; what it does is what the tests here do",
    "make test": "is what runs this test",
    "make benchmark": "measures for minutes",
    "python benchmarks/": "measures for minutes",
    "sudo python benchmarks/": "measures for hours, as root",
    "python -m tests.fuzzing": "takes minutes to hours; tests/fuzzing/test_fuzzing.py runs the same with fewer inputs",
    "python3 - <<'EOF'": "test_the_documented_steps_verify_by_hand runs it, with the lines that follow",
    "silo audit verifier": "tests/privacy/party/test_verifier_command.py runs it",
    "silo prepare": "tests/silo/data/test_preparing.py runs it on folders, tables and DICOM files",
    "silo witness": "tests/support/runs/every_command.py and tests/privacy/party/test_witness_commands.py run it",
    "silo audit verify hospital1-evidence.json --witness": "tests/end_to_end/test_witnesses.py runs it",
    "silo evaluate": "tests/silo/model/test_evaluation.py runs it on a model that has been trained",
    "silo export": "tests/silo/model/test_exporting.py runs it in both formats",
    "silo models": "tests/silo/model/test_kept_models.py runs it on runs of several rounds",
    "silo keys --config hospital1-flower": "tests/end_to_end/test_flower.py types it, with Flower's own processes",
    "silo flower": "the same",
    "silo train --confined": "tests/end_to_end/test_confined.py runs it, where the machine allows namespaces",
    "silo report --config hospital1-flower": "the same",
    "simulation run --config configs/experiments/coloncells-": "needs real images and hours",
    "simulation results --config configs/experiments/coloncells-": "needs the finished runs of these",
    "simulation run --config configs/experiments/heads-": "needs real images and an hour",
    "simulation results --config configs/experiments/heads-": "needs the finished runs of these",
    "simulation run --config configs/experiments/fashion-": "needs real images and hours",
    "simulation results --config configs/experiments/fashion-": "needs the finished runs of these",
}
"""Beginnings of commands that are not run here, and why."""


@dataclass(frozen=True)
class Documented:
    """A command as a page has it. ``code``: the exit code that the page says; 0 if it says nothing."""

    page: str
    line: int
    text: str
    code: int = 0

    @property
    def words(self) -> list[str]:
        """Without what a shell does after the first of several commands."""
        return shlex.split(self.text.partition(" && ")[0], comments=True)

    def __str__(self) -> str:
        return f"{self.page}, line {self.line}: {self.text}"


def documented(page: str) -> list[Documented]:
    """The commands in a page's fenced blocks. A reference's usage lines (``$ silo …``) are made from the code."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for block in FENCE.finditer(text):
        if block[1] not in ("", "sh"):
            continue
        first = text.count("\n", 0, block.start(2)) + 1
        lines = block[2].split("\n")
        number = 0
        while number < len(lines):
            start, line = number, lines[number].strip()
            while line.endswith("\\") and number + 1 < len(lines):
                number += 1
                line = f"{line[:-1].rstrip()} {lines[number].strip()}"
            number += 1
            if line.split(" ", 1)[0] in PROGRAMS:
                code = EXIT_CODE.search(line)
                found.append(Documented(page, first + start, line, int(code[1]) if code else 0))
    return found


COMMANDS = [command for page in PAGES for command in documented(page)]


def why_not_run(command: Documented) -> str | None:
    return next((why for beginning, why in NOT_RUN.items() if command.text.startswith(beginning)), None)


def cli(name: str) -> Any:
    if name == "silo":
        whole = typer.Typer()
        whole.registered_callback = silo_app.registered_callback
        whole.registered_commands = [*silo_app.registered_commands]
        whole.registered_groups = [*silo_app.registered_groups]
        whole.command()(shard)
        return get_command(whole)
    return get_command({"coordinator": coordinator_app, "simulation": simulation_app}[name])


def resolve(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and the words after its name; raises ``KeyError`` for none."""
    found, rest = cli(words[0]), words[1:]
    while hasattr(found, "commands") and rest and not rest[0].startswith("-"):
        found = found.commands[rest[0]]
        rest = rest[1:]
    return found, rest


def unknown_in(words: list[str]) -> str | None:
    """What there is not, of a program, a command, an option, a make target or a script."""
    program = words[0]
    if program in ("silo", "coordinator", "simulation"):
        try:
            found, rest = resolve(words)
        except KeyError as error:
            return f"there is no command {error}"
        try:
            found.make_context(found.name, rest)
        except Exception as error:  # Typer's own errors, whatever it calls them in this release
            return str(error) or type(error).__name__
        return None
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return None if words[1] in targets else f"the Makefile has no target {words[1]}"
    if program == "./setup.sh":
        return None if (ROOT / program).exists() else "there is no such script"
    script = words[words.index("python" if "python" in words else program) + 1 :]
    if script[0] == "-":
        return None
    path = ROOT / "tests/fuzzing/__main__.py" if script[:2] == ["-m", "tests.fuzzing"] else ROOT / script[0]
    path = path if path.exists() else ROOT / "docs" / script[0]
    if not path.exists():
        return f"there is no {script[0]}"
    options = [word for word in script if word.startswith("--")]
    missing = [option for option in options if f'"{option}"' not in path.read_text()]
    return f"{script[0]} has no {', '.join(missing)}" if missing else None


@pytest.mark.parametrize("page", [page for page in PAGES if documented(page)])
def test_every_documented_command_and_option_exists(page: str) -> None:
    wrong = [f"{command}: {why}" for command in documented(page) if (why := unknown_in(command.words)) is not None]
    assert wrong == []


def test_a_command_or_option_that_there_is_not_is_found() -> None:
    for text in (
        "silo no-such --config x.yaml",
        "silo report --no-such",
        "silo report",  # without --config
        "coordinator ca issue hospital1 --role nobody --request tls.csr",
        "make no-such",
        "python benchmarks/no_such.py",
        "python benchmarks/round_cost.py --no-such",
    ):
        assert unknown_in(text.split()) is not None, text


def test_commands_within_sentences_exist() -> None:
    """``silo audit verify`` in a text need not be whole, but there must be such a command with these options."""
    wrong = []
    for page in PAGES:
        if page == "docs/reference/commands.md":
            continue  # made from the code
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for span in re.findall(r"(?<!`)`((?:silo|coordinator|simulation) [^`]+)`(?!`)", text):
            words = span.replace("\n", " ").split()
            try:
                found, rest = resolve([word for word in words if word != "…"])
            except KeyError as error:
                wrong.append(f"{page}: `{span}`: there is no command {error}")
                continue
            known = {name for option in found.params for name in option.opts}
            wrong += [f"{page}: `{span}`: no {w}" for w in rest if re.fullmatch(r"--\w[\w-]*", w) and w not in known]
    assert wrong == []


def test_every_experiment_that_a_page_names_can_be_read() -> None:
    named = {word for command in COMMANDS for word in command.words if word.startswith("configs/experiments/")}
    assert len(named) > 4
    for name in named:
        ExperimentConfig.read(ROOT / name)


def test_the_list_of_commands_that_are_not_run_has_nothing_superfluous() -> None:
    for beginning in NOT_RUN:
        assert any(command.text.startswith(beginning) for command in COMMANDS), beginning


@dataclass
class Reader:
    """Somebody who types what the pages say. ``places``: words that stand for something else on this machine.

    ``known``: what need not be typed again in this folder, because it changes nothing.
    """

    folder: Path
    places: dict[str, str] = field(default_factory=dict)
    done: set[Documented] = field(default_factory=set)
    running: list[Forked] = field(default_factory=list)
    known: set[tuple[str, ...]] = field(default_factory=set)

    def elsewhere(self, folder: Path) -> Reader:
        """The same person at another machine."""
        folder.mkdir(parents=True, exist_ok=True)
        return Reader(folder, self.places, self.done, self.running)

    def types(self, command: Documented, *more: str, answers: str | None = None, again: bool = False) -> str:
        """Types a command to its end, which must be as its page says; returns what it said."""
        words = self._words(command, *more)
        if tuple(words) in self.known and not again:
            self.done.add(command)
            return ""
        self.known.add(tuple(words))
        said = self.folder / "command.out"
        said.unlink(missing_ok=True)
        if words[0] in ("silo", "coordinator"):
            prefix = [] if answers is None else ["answering", answers]
            code = Forked([*prefix, *words], self.folder, said).wait(PATIENCE)
        elif words[0] == "simulation":
            code = Forked(["one_process", *words], self.folder, said).wait(PATIENCE)
        else:
            program = [sys.executable, "-I"] if words[0].startswith("python") else words[:1]
            with said.open("wb") as file:
                code = subprocess.run([*program, *words[1:]], cwd=self.folder, stdout=file, stderr=file).returncode
        assert code == command.code, f"{command}\ntyped as {words} in {self.folder}: {code}\n{said.read_text()}"
        self.done.add(command)
        return said.read_text()

    def starts(self, command: Documented, *more: str, until: str) -> Forked:
        """Starts a daemon; returns when it has said that it serves."""
        words = self._words(command, *more)
        log = self.folder / f"{len(self.running)}.log"
        process = Forked(words, self.folder, log)
        self.running.append(process)
        deadline = time.monotonic() + PATIENCE
        while not log.exists() or until not in log.read_text():
            said = log.read_text() if log.exists() else ""
            assert process.poll() is None, f"{command} ended: {said}"
            assert time.monotonic() < deadline, f"{command} did not say {until!r}: {said}"
            time.sleep(0.02)
        self.done.add(command)
        return process

    def reads(self, page: str, after: str = "", before: str = "") -> list[Documented]:
        """The commands of a page that are typed, in order; of one part of it only."""
        text = (ROOT / page).read_text(encoding="utf-8")
        first = text[: text.index(after)].count("\n") + 1
        last = text[: text.index(before) if before else len(text)].count("\n") + 1
        found = [c for c in documented(page) if first <= c.line <= last and why_not_run(c) is None]
        assert found, f"{page} has no commands after {after!r}"
        return found

    def _words(self, command: Documented, *more: str) -> list[str]:
        return [*(self.places.get(word, word) for word in command.words), *more]


def end(process: Forked) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


@contextlib.contextmanager
def ending(reader: Reader) -> Iterator[None]:
    try:
        yield
    finally:
        for process in reader.running:
            end(process)


@pytest.fixture(scope="module")
def shards() -> list[ImageDataset]:
    """Three small synthetic shards."""
    setting = PracticalGroups(groups=(1, 1, 1), train_per_silo=90, test_per_silo=30)
    return cut(generate_tissue(seed=1, train=900, test=270), setting, seed=1)


def test_every_documented_command_runs_and_ends_as_its_page_says(tmp_path: Path, shards: list[ImageDataset]) -> None:
    reader = Reader(tmp_path)
    with ending(reader):
        follow_the_readme(reader.elsewhere(tmp_path / "readme"), shards[0])
        sign_certificates_by_hand(reader)
        follow_the_pages_after_a_run(reader, tmp_path / "source", shards)
    left = [command for command in COMMANDS if command not in reader.done and why_not_run(command) is None]
    assert [str(command) for command in left] == [], "neither run here nor in NOT_RUN"


def follow_the_readme(reader: Reader, images: ImageDataset) -> None:
    """Coordinator and hospital on one machine, from nothing to a withdrawal; while the coordinator serves, the pages
    about joining and watching too."""
    folder = reader.folder
    save_npz(folder / "images.npz", images)
    (folder / "pictures").mkdir()
    Image.fromarray(images.test.images[0]).save(folder / "pictures" / "one.png")
    (folder / "whole.npz").write_bytes(b"")
    save_npz(folder / "whole.npz", generate_tissue(seed=2, train=4500, test=900))
    reader.places |= {"coordinator.example.org": "127.0.0.1", "pathmnist": "whole.npz"}

    def part(after: str, before: str) -> list[Documented]:
        return reader.reads("README.md", after, before)

    init, serve, join, train = part("## Four commands", "## What a hospital brings")
    ports = ["--port", str(free_port()), "--enrolment-port", str(free_port())]
    invited = reader.types(init, *ports)
    (invitation,) = [line for line in invited.splitlines() if line.startswith("medsilo:1/")]
    reader.places[join.words[2]] = invitation
    coordinator = reader.starts(serve, until="listening on")
    assert "hospital1: ready" in reader.types(join)
    reader.types(train)

    settings = folder / "coordinator.yaml"
    settings.write_text(settings.read_text().replace("silos: [hospital1]", "silos: [hospital1, hospital2]"))
    for command in reader.reads("docs/joining.md", before="## Certificates by hand"):
        reader.types(command)
    page, operator, own_page = reader.reads("docs/operating.md")
    reader.places["0.0.0.0:8443"] = f"127.0.0.1:{free_port()}"
    end(reader.starts(page, until="The page is at"))
    reader.types(operator, answers="a password,a password")
    end(reader.starts(own_page, "--port", str(free_port()), until="Its token is in"))

    before_leaving, peer = part("## What a hospital brings", "## Proof"), "coordinator-evidence.json"
    for command in before_leaving:
        reader.types(command, answers="y" if "withdraw" in command.words else None)
    end(coordinator)
    given(reader, "coordinator", "audit", "export", "--config", "coordinator.yaml", "--out", peer)
    for command in part("## Proof", "## What can leave"):
        reader.types(command)


def given(reader: Reader, *words: str) -> str:
    """Does what a page takes for granted."""
    return reader.elsewhere(reader.folder).types(Documented("here", 0, shlex.join(words)))


def sign_certificates_by_hand(everyone: Reader) -> None:
    """The CA's machine, the coordinator's and the hospital's, with what travels between them."""
    machines = everyone.folder / "by-hand"
    authority, coordinator, hospital = (
        everyone.elsewhere(machines / name) for name in ("authority", "coordinator", "hospital")
    )
    shutil.copy(ROOT / "configs" / "coordinator.yaml", coordinator.folder)
    shutil.copy(ROOT / "configs" / "hospital1.yaml", hospital.folder)
    init, keys, issue, own_keys, sign = everyone.reads("docs/joining.md", "## Certificates by hand")
    authority.types(init)
    coordinator.types(keys)
    shutil.copy(coordinator.folder / "state/coordinator/keys/tls.csr", authority.folder)
    authority.types(issue)
    hospital.types(own_keys)
    shutil.copy(hospital.folder / "state/hospital1/keys/tls.csr", authority.folder)
    authority.types(sign)
    renew, revoke, revoke_one = everyone.reads("docs/certificates.md")
    authority.types(renew, again=True)
    issued = json.loads((authority.folder / "ca" / "issued.jsonl").read_text().splitlines()[-1])
    everyone.places[revoke_one.words[-1]] = issued["serial"]
    authority.types(revoke_one)
    authority.types(revoke)


def follow_the_pages_after_a_run(everyone: Reader, source: Path, shards: list[ImageDataset]) -> None:
    """In the source's folder with what ``make demo`` leaves in ``demo``: a run of three hospitals that has ended."""
    top, reader = everyone.elsewhere(source), everyone.elsewhere(source / "demo")
    one = made_like_the_demo(reader.folder, shards)
    try:
        for command in top.reads("docs/experiments.md"):
            small_experiment(source / command.words[-1])
            top.types(command)
        follow_the_tutorial(top, reader)
        run_examples(source)
        run_docstrings(source)
        shutil.copy(reader.folder / "state/hospital3/keys/audit.pub", reader.folder)
        for page in ("docs/audit.md", "docs/report.md", "docs/rehearsal.md"):
            for command in reader.reads(page):
                if "proof.json" in command.words[:4]:
                    prove_two_histories(reader.folder)
                if command.words[0] == "python3":
                    shutil.copy(ROOT / "docs" / command.words[1], reader.folder)
                    shutil.copy(reader.folder / "hospital3-evidence.json", reader.folder / "bundle.json")
                reader.types(command)
        # These change what the hospital agrees to.
        for page in ("docs/consent.md", "docs/data-protection-officer.md"):
            for command in reader.reads(page):
                changes = {"withdraw", "give", "approve"} & set(command.words)
                reader.types(command, answers="y" if changes else None, again=bool(changes))
    finally:
        one.kill_everything()


def prove_two_histories(folder: Path) -> None:
    """What ``--proof`` writes against a coordinator that has signed two roots for one size: the demo's is honest."""
    keys = folder / "state" / "coordinator" / "keys"
    shutil.copy(keys / "audit.pub", folder / "coordinator.pub")
    one, other = (
        View(
            shown_to=f"spiffe://test/silo/hospital{number}",
            checkpoint=Checkpoint("medsilo/test/coordinator/coordinator", 9, bytes([number]) * 32).sign(
                load_audit_key(keys / "audit.key")
            ),
            size=0,
            root=EMPTY_ROOT.hex(),
            proof=(),
        )
        for number in (1, 3)
    )
    party, key = "spiffe://test/coordinator/coordinator", load_audit_public(keys / "audit.pub").hex()
    ForkProof(party=party, public_key=key, views=(one, other)).write(folder / "proof.json")


def made_like_the_demo(folder: Path, shards: list[ImageDataset]) -> Federation:
    run = {"name": "tissue-1", "model": {"name": "mlp-64", "input_shape": [3, 28, 28], "classes": 9}, "rounds": 4}
    one = Federation(folder, shards, run=run)
    (folder / "shards").mkdir()
    for name in one.silos:
        shutil.copy(folder / f"{name}.npz", folder / "shards")
        one.write_silo(name, keep_sent_days=365)
    one.start("coordinator", "serve", "--config", "coordinator.yaml")
    one.wait_to_say("coordinator", "listening")
    one.finish(*[one.start_silo(name) for name in one.silos])
    for program, party in (("silo", "hospital1"), ("coordinator", "coordinator")):
        one.command(program, "audit", "export", "--config", f"{party}.yaml", "--out", f"{party}-evidence.json")
    (folder / "plan.json").write_text(one.command("coordinator", "plan", "--config", "coordinator.yaml"))
    return one


def small_experiment(path: Path) -> None:
    """The shipped experiment with fewer and smaller runs, on fewer synthetic images."""
    if path.exists():
        return
    path.parent.mkdir(parents=True)
    content = yaml.safe_load((ROOT / "configs" / "experiments" / path.name).read_text())
    settings: Mapping[str, Any] = {
        name: {**setting, "silos": 3, "train_per_silo": 40, "test_per_silo": 10}
        for name, setting in content["settings"].items()
    }
    save_npz(path.parent / "few.npz", generate_tissue(seed=3, train=900, test=270))
    small = {**content, "data": "few.npz", "settings": settings, "rounds": 2, "seeds": [1]}
    path.write_text(yaml.safe_dump(small, sort_keys=False))


def follow_the_tutorial(top: Reader, reader: Reader) -> None:
    consent = reader.folder / "hospital1.consent.yaml"
    agreed = consent.read_text()
    text = (ROOT / "docs" / "tutorial.md").read_text()
    take_away = text[: text.index("## Take something away")].count("\n") + 1
    for command in top.reads("docs/tutorial.md"):
        if command.words[0] == "simulation":
            top.types(command)
            continue
        narrowed = command.words[1] == "inspect" and command.line > take_away
        if narrowed:
            assert "- MODEL_PARAMETERS\n" in agreed
            consent.write_text(agreed.replace("- MODEL_PARAMETERS\n", ""))
        if "forged" in command.words:
            (forging,) = re.findall(r"^cp .*\nsed .*\n", text, re.MULTILINE)
            subprocess.run(["sh", "-e", "-c", forging], cwd=reader.folder, check=True)
        said = reader.types(command, again=narrowed)
        assert ("nothing of it would leave" in said) == narrowed
        assert ("NOT sound" in said) == ("forged" in command.words)
        consent.write_text(agreed)


def run_examples(folder: Path) -> None:
    """The examples of ``docs/python.md``, each with the answer that stands below it."""
    shutil.copy(ROOT / "docs" / "python.md", folder)
    said = folder / "examples.out"
    assert Forked(["one_process", "python.md"], folder, said).wait(PATIENCE) == 0, said.read_text()


def run_docstrings(folder: Path) -> None:
    """The example of each public name of ``medsilo``."""
    said = folder / "docstrings.out"
    assert Forked(["one_process", "medsilo"], folder, said).wait(PATIENCE) == 0, said.read_text()
