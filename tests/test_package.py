"""The built wheel: what is in it, and that it lives beside Hugging Face's `kernels` package."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from coppice import __version__
from coppice.radix import compiled

ROOT = Path(__file__).resolve().parent.parent
NOT_COMPILED = f"coppice/radix/{compiled.REASON}"
ROOMS = ("radix", "kernels", "runtime", "frontend")
TAKEN = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "coppice", *ROOMS)

# Loads the parts of transformers that look for a top-level `kernels`, then every room.
PROBE = """
import transformers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8,
                             num_hidden_layers=1, num_attention_heads=1))
import coppice, coppice.radix, coppice.kernels, coppice.runtime, coppice.frontend
from coppice import LLM, RadixTree, SamplingParams
import kernels
print(coppice.__file__)
print(kernels.__file__)
"""


def run(
    *command: str | Path, cwd: Path | None = None, compiles: bool = False, seconds: float = 240
) -> str:
    """Standard output of `command`, which has to succeed; what it builds is compiled if asked."""
    ours = ("PYTHONPATH", compiled.SWITCH)
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    if not compiles:
        environment["COPPICE_PURE_PYTHON"] = "1"
    ran = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def sources(folder: Path) -> None:
    """Copies all that a build takes, so that no earlier build can leak into it."""
    for name in TAKEN:
        if (ROOT / name).is_dir():
            skip = shutil.ignore_patterns("__pycache__", "*.so", "*.digest")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skip)
        else:
            shutil.copy2(ROOT / name, folder / name)


def build(source: Path, out: Path, *, compiles: bool = False) -> Path:
    """The wheel of a folder or source archive."""
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out)
    run(sys.executable, "-m", "pip", "wheel", *options, source, compiles=compiles)
    (built,) = out.glob("coppice-*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without compiled modules."""
    source = tmp_path_factory.mktemp("source")
    sources(source)
    return build(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of commands of a new environment with the wheel in it.

    The environment sees the running one's packages through a path file, which does not process
    that environment's own path files: the editable install of this repository stays invisible.
    """
    home = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    (site,) = home.glob("lib/python3*/site-packages")
    (site / "neighbours.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel)
    return home / "bin"


def test_one_package_at_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {part for part in top if not part.endswith(".dist-info")} == {"coppice"}
    assert len(top) == 2


def test_every_file_of_every_room_is_in(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {"coppice/__init__.py", "coppice/py.typed", NOT_COMPILED}
    for room in ROOMS:
        modules = (path for path in (ROOT / room).rglob("*.py"))
        expected |= {f"coppice/{path.relative_to(ROOT).as_posix()}" for path in modules}
    for files in (
        "demo/model/*",
        "replay/*.html",
        "replay/*.css",
        "replay/*.js",
        "simulate/*.html",
        "report/*.json",
        "report/dashboard/*",
        "server/*.html",
    ):
        shipped = [*(ROOT / "frontend").glob(files)]
        assert shipped, files
        expected |= {f"coppice/{path.relative_to(ROOT).as_posix()}" for path in shipped}
    assert "coppice/radix/__init__.py" in expected
    assert expected == {name for name in names if name.startswith("coppice/")}


@pytest.mark.parametrize("where", ["root", pytest.param("elsewhere", marks=pytest.mark.slow)])
def test_beside_hugging_face_kernels(installed: Path, tmp_path: Path, where: str) -> None:
    """With the working directory kept off the import path, as in every installed command."""
    cwd = ROOT if where == "root" else tmp_path
    ours, theirs = run(installed / "python", "-P", "-c", PROBE, cwd=cwd).split()
    assert Path(ours).is_relative_to(installed.parent)
    assert Path(theirs) == Path(sysconfig.get_path("purelib")) / "kernels" / "__init__.py"


@pytest.mark.slow
def test_with_the_root_on_the_import_path(installed: Path) -> None:
    """`python -c` in the root: the room `kernels` is found first, and nothing trips over it."""
    ours, kernels = run(installed / "python", "-c", PROBE, cwd=ROOT).split()
    assert Path(ours) == ROOT / "coppice" / "__init__.py"
    assert Path(kernels) == ROOT / "kernels" / "__init__.py"


@pytest.mark.parametrize("where", ["root", "elsewhere"])
def test_the_command_runs(installed: Path, tmp_path: Path, where: str) -> None:
    cwd = ROOT if where == "root" else tmp_path
    assert "generate" in run(installed / "coppice", "--help", cwd=cwd)


@pytest.mark.slow
def test_a_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """The archive holds the rooms as ordinary folders in coppice/, since links do not travel."""
    source = tmp_path / "source"
    source.mkdir()
    sources(source)
    call = "from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    # -P, as every build front end does: Hugging Face's `kernels` brings a setuptools plugin.
    run(sys.executable, "-P", "-c", f"import sys; {call}", tmp_path, cwd=source)
    (archive,) = tmp_path.glob("coppice-*.tar.gz")
    rebuilt = build(archive, tmp_path)
    assert set(zipfile.ZipFile(rebuilt).namelist()) == set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_wheel_with_the_tree_compiled(wheel: Path, tmp_path: Path) -> None:
    """It has the sources and the compiled modules of all of them, and uses these."""
    source, out = tmp_path / "source", tmp_path / "wheel"
    source.mkdir()
    sources(source)
    built = build(source, out, compiles=True)
    names = set(zipfile.ZipFile(built).namelist())
    plain = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("coppice/")}
    plain.remove(NOT_COMPILED)
    added = {
        name.removeprefix("coppice/radix/").split(".")[0].replace("/", ".")
        for name in names - plain
        if "/radix/" in name
    }
    assert added == {*compiled.MODULES, "compiled__mypyc", "compiled"}
    assert plain < names
    zipfile.ZipFile(built).extractall(tmp_path / "site")
    told = "import sys; sys.path.insert(0, sys.argv[1]); from coppice.radix import compiled, tree; "
    shown = "print(compiled.in_use('coppice.radix'), tree.RadixTree)"
    command = (sys.executable, "-S", "-P", "-c")
    site = sysconfig.get_path("purelib")
    load = f"import sys; sys.path.append({site!r}); " + told + shown
    assert run(*command, load, tmp_path / "site", compiles=True).startswith("True")
    assert run(*command, load, tmp_path / "site").startswith("False")


def test_a_wheel_that_is_not_compiled_keeps_the_reason(wheel: Path, installed: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    reason = "COPPICE_PURE_PYTHON was 1 when it was built"
    assert zipfile.ZipFile(wheel).read(NOT_COMPILED).decode().strip() == reason
    version = run(installed / "coppice", "--version", compiles=True)
    assert version == f"coppice {__version__}, the tree is not compiled ({reason})\n"


def test_the_metadata_is_that_of_the_project(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    archive = zipfile.ZipFile(wheel)
    (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    found = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
    assert (found["Name"], found["Version"]) == (project["name"], __version__)
    assert found["License-Expression"] == project["license"] == "Apache-2.0"
    assert f"{folder}/licenses/LICENSE" in archive.namelist()
    assert found["Requires-Python"] == project["requires-python"]
    assert found.get_all("Classifier") == project["classifiers"]
    needed = [each for each in found.get_all("Requires-Dist") or () if "extra ==" not in each]
    assert needed == project["dependencies"]
    description = found.get_payload(decode=True)
    assert isinstance(description, bytes)
    assert description.decode().strip() == (ROOT / "README.md").read_text("utf-8").strip()


def test_wheels_are_built_for_the_versions_that_the_classifiers_name() -> None:
    text = (ROOT / ".github" / "workflows" / "wheels.yml").read_text(encoding="utf-8")
    built = set(re.findall(r"cp3(\d+)-manylinux", text))
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert built == set(re.findall(r"Python :: 3\.(\d+)", pyproject)) == {"11", "12", "13"}
    assert set(re.findall(r"arch: (\w+),", text)) == {"x86_64", "aarch64"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_build_in_isolation_compiles_the_tree(tmp_path: Path) -> None:
    """From an environment without packages: what the build needs, it must ask for itself."""
    source, out, empty = tmp_path / "source", tmp_path / "wheel", tmp_path / "empty"
    source.mkdir()
    sources(source)
    run(sys.executable, "-m", "venv", empty)
    pip = (empty / "bin" / "python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", out)
    run(*pip, source, compiles=True, seconds=800)
    (built,) = out.glob("coppice-*.whl")
    names = zipfile.ZipFile(built).namelist()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for module in compiled.MODULES:
        assert f"coppice/radix/{module.replace('.', '/')}{suffix}" in names
    assert f"coppice/radix/{compiled.RECORD}" in names
    assert NOT_COMPILED not in names
    assert f"-cp{sys.version_info[0]}{sys.version_info[1]}-" in built.name
