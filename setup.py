"""Compiles the core of the radix tree with mypyc, if possible; all else is in pyproject.toml.

Without mypyc or a C compiler, or with COPPICE_PURE_PYTHON=1, the same modules run as plain Python.
"""

from __future__ import annotations

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("coppice/radix")
spec = spec_from_file_location("compiled", FOLDER / "compiled.py")
assert spec is not None and spec.loader is not None
compiled = module_from_spec(spec)
spec.loader.exec_module(compiled)


def extensions() -> list[Extension]:
    """One shared library with all compiled modules, and a small one for each, which imports it."""
    if os.environ.get(compiled.SWITCH) == "1":
        return []
    try:
        from mypyc.build import mypycify
    except ImportError:
        print("coppice: mypyc is missing, the tree is not compiled", file=sys.stderr)
        return []
    # Without pyproject.toml's settings for mypy, which would follow imports into torch.
    options = ["--config-file=", "--explicit-package-bases", "--follow-imports=skip"]
    paths = [str(compiled.source(FOLDER, name)) for name in compiled.MODULES]
    try:
        made = mypycify(
            [*options, str(FOLDER / "compiled.py"), *paths],
            only_compile_paths=paths,
            debug_level="0",
            target_dir="build/mypyc",
            group_name="coppice.radix.compiled",
        )
    except SystemExit:  # mypyc has printed the reason
        print("coppice: mypyc failed, the tree is not compiled", file=sys.stderr)
        return []
    for extension in made:
        extension.optional = True
    return list(made)


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
            record.write_text(compiled.digest(FOLDER), encoding="ascii")
            return
        for path in (record, *outputs):
            path.unlink(missing_ok=True)
        print("coppice: no C compiler, the tree is not compiled", file=sys.stderr)


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildAll})
