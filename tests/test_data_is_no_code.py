"""What is read is data: nothing in the packages turns bytes into code, runs a shell, or unpacks without end."""

from __future__ import annotations

import ast
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medsilo.algorithms.datasets import load_npz, save_npz
from medsilo.privacy.errors import ConfigurationError, DataError
from medsilo.privacy.files.configuration import StrictModel, load
from medsilo.silo.data.image_files import read_image
from medsilo.silo.data.synthetic import generate_tissue

ROOT = Path(__file__).parents[1]
PACKAGES = ("protos", "privacy", "algorithms", "silo", "coordinator", "simulation")
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle", "code"}
CALLS = {
    *(
        "eval",
        "exec",
        "compile",
        "os.system",
        "os.popen",
        "torch.load",
        "torch.save",
        "torch.jit.load",
        "torch.hub.load",
    ),
    *("yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle", "np.fromfile"),
}
ALLOWED = {
    # The loader that stands there is a SafeLoader.
    ("privacy/files/configuration.py", "yaml.load"),
    # With weights_only=True alone, which the test below holds; pickle is there for the name of its error.
    ("algorithms/models/given_weights.py", "torch.load"),
    ("algorithms/models/given_weights.py", "import pickle"),
}


def found_in(source: str, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            taken = [module for module in names if module.split(".")[0] in MODULES]
            yield from (f"{name}: import {m}" for m in taken if (name, f"import {m}") not in ALLOWED)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if (called in CALLS or called == "yaml.load") and (name, called) not in ALLOWED:
            yield f"{name}:{node.lineno}: {called}"
        options = {word.arg: word.value for word in node.keywords}
        if called == "torch.load" and ast.unparse(options.get("weights_only", ast.Constant(None))) != "True":
            yield f"{name}:{node.lineno}: torch.load without weights_only=True"
        if (
            called in ("np.load", "numpy.load")
            and ast.unparse(options.get("allow_pickle", ast.Constant(None))) != "False"
        ):
            yield f"{name}:{node.lineno}: {called} without allow_pickle=False"
        for option in ("allow_pickle", "shell"):
            if option in options and ast.unparse(options[option]) != "False":
                yield f"{name}:{node.lineno}: {option}={ast.unparse(options[option])}"


def test_no_package_unpickles_evaluates_or_runs_a_shell() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    assert [hit for path in files for hit in found_in(path.read_text(), str(path.relative_to(ROOT)))] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_search_finds_each_of_them(line: str) -> None:
    assert list(found_in(line, "x.py"))


class _Lists(StrictModel):
    a: tuple[object, ...] = ()


@pytest.mark.parametrize("form", ["lists", "mappings", "merges"])
def test_aliases_that_stand_for_more_than_any_memory_are_refused_at_once(tmp_path: Path, form: str) -> None:
    first = {"lists": "[x, x]", "mappings": "{k: x}", "merges": "{k: x}"}[form]
    lines = [f"a0: &a0 {first}"]
    for n in range(1, 40):
        line = {"lists": "[*a{0}, *a{0}]", "mappings": "{{k: *a{0}, l: *a{0}}}", "merges": "{{<<: *a{0}, k{0}: 1}}"}[
            form
        ]
        lines.append(f"a{n}: &a{n} " + line.format(n - 1))
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join([*lines, "a: *a39"]))
    with pytest.raises(ConfigurationError, match="aliases"):
        load(path, _Lists)


def test_a_very_large_configuration_and_a_long_value_are_not_shown_back(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("a: [" + "x, " * 300_000 + "]")
    with pytest.raises(ConfigurationError, match="larger than 512 KiB"):
        load(path, _Lists)
    path.write_text("a: " + "x" * 100_000)
    with pytest.raises(ConfigurationError) as caught:
        load(path, _Lists)
    assert len(str(caught.value)) < 1000


def test_an_archive_that_unpacks_without_end_is_refused_before_it_does(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    save_npz(path, generate_tissue(seed=3, train=9, test=9, size=8))
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist() if name != "train_images.npy"}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (300 << 20, 1, 1)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
        with archive.open("train_images.npy", "w") as member:
            member.write(header.getvalue())
            for _ in range(300):
                member.write(bytes(1 << 20))
    assert path.stat().st_size < 4 << 20
    with pytest.raises(DataError, match="would become"):
        load_npz(path)


def test_a_picture_that_says_it_is_huge_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    Image.new("1", (10_000, 8_000)).save(path)
    assert path.stat().st_size < 20_000
    with pytest.raises(DataError, match="pixels are more than"):
        read_image(path, channels=3, height=28, width=28)
