"""Compiles the core of the radix tree with mypyc, if possible; all else is in pyproject.toml.

Without mypyc or a C compiler, or with COPPICE_PURE_PYTHON=1, the same modules run as plain Python,
and a file beside them keeps the reason, which `coppice --version` shows.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

FOLDER = Path("coppice/radix")
spec = spec_from_file_location("compiled", FOLDER / "compiled.py")
assert spec is not None and spec.loader is not None
compiled = module_from_spec(spec)
spec.loader.exec_module(compiled)


def fall_back(reason: str) -> None:
    """Warns, and keeps the reason for the wheel: few read what a build prints."""
    REASONS.append(reason)
    print(f"coppice: the tree is not compiled: {reason}", file=sys.stderr)


REASONS: list[str] = []


def extensions() -> list[Extension]:
    """One shared library with all compiled modules, and a small one for each, which imports it."""
    if os.environ.get(compiled.SWITCH) == "1":
        fall_back(f"{compiled.SWITCH} was 1 when it was built")
        return []
    try:
        from mypyc.build import mypycify
    except ImportError as error:
        fall_back(f"mypyc is missing: {error}")
        return []
    # Without pyproject.toml's settings for mypy, which would follow imports into torch.
    options = ["--config-file=", "--explicit-package-bases", "--follow-imports=skip"]
    paths = [str(compiled.source(FOLDER, name)) for name in compiled.MODULES]
    # Types that the modules import from others.
    known = [str(FOLDER / "compiled.py"), str(FOLDER / "mirror" / "numbers.py")]
    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            made = mypycify(
                [*options, *known, *paths],
                only_compile_paths=paths,
                debug_level="0",
                target_dir="build/mypyc",
                group_name="coppice.radix.compiled",
            )
    except SystemExit as stop:
        lines = f"{said.getvalue()}\n{stop}".strip().splitlines()
        errors = [line for line in lines if "error" in line] or lines
        print(said.getvalue(), file=sys.stderr)
        fall_back(f"mypyc refused it: {errors[0] if errors else 'without a reason'}")
        return []
    print(said.getvalue(), file=sys.stderr)
    for extension in made:
        extension.optional = True
    return list(made)


class BuildModules(build_py):
    """Puts the reason beside the modules if they are not compiled, and removes an older one."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            keep_reason(Path(self.build_lib))


class BuildAll(build_ext):
    """Builds all modules or none, and writes a digest of their sources beside them."""

    def run(self) -> None:
        super().run()
        outputs = [Path(output) for output in self.get_outputs()]
        if not outputs:
            return
        root = Path() if self.inplace else Path(self.build_lib)
        outputs = [root / output.relative_to(self.build_lib) for output in outputs]
        record = root / FOLDER / compiled.RECORD
        if all(output.exists() for output in outputs):
            record.write_text(compiled.record(FOLDER), encoding="ascii")
        else:
            for path in (record, *outputs):
                path.unlink(missing_ok=True)
            fall_back("no C compiler was found, or it failed")
        keep_reason(root)


def keep_reason(root: Path) -> None:
    """Writes why the tree is not compiled to a file of the package in `root`."""
    file = root / FOLDER / compiled.REASON
    if REASONS:
        file.write_text("; ".join(REASONS) + "\n", encoding="utf-8")
    else:
        file.unlink(missing_ok=True)


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildAll, "build_py": BuildModules})
