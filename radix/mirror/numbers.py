"""Numbers of 64 bits, and bytes that grow by them: the compiler's own, and in Python.

Compiled code uses its own, without an object for each number, and not what this module defines.
The library that it calls comes with the compiler, so that other code may have to do without it.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from librt.strings import BytesWriter as BytesWriter
    from librt.strings import write_i64_le as write_i64_le
    from mypy_extensions import i64 as i64
else:
    i64 = int

    class BytesWriter:
        """Bytes that grow."""

        def __init__(self) -> None:
            self.numbers = array("q")

        def __len__(self) -> int:
            return 8 * len(self.numbers)

        def getvalue(self) -> bytes:
            return self.numbers.tobytes()

    def write_i64_le(writer: BytesWriter, number: int) -> None:
        """Appends a number of 64 bits."""
        writer.numbers.append(number)
