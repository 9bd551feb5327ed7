"""Compile Triton kernels for sm_90 without a GPU: ``python compile_for_hopper.py [NAME ...]``.

A name is one of ``--list``, or attention of any shape: ``model 128 group 4 window softcap``.

Prints a JSON object a line for each variant: its registers, bytes of stack and local memory, spill
instructions, uniform registers that are read before anything writes them, bytes of shared memory,
how many tensor-core instructions it has, how many programs a multiprocessor holds; and of its loops
over tiles: the instructions of each, the buffers of what is loaded ahead (the fewest of any
tensor), and the most copies that may be under way at a wait. Run it where TRITON_INTERPRET is not
set. ``--list`` prints the names alone, ``--table`` a Markdown table.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from coppice.kernels.sampling.choose_triton import count_keys, draw, greatest, keep, weigh_keys
from coppice.kernels.schedule.tiles import (
    Tile,
    choose_tiles,
    expert_tile,
    head_blocks,
    product_tile,
)
from coppice.kernels.triton.attention import attend_items
from coppice.kernels.triton.cache import copy_page_words, rotate_rows, write_rows
from coppice.kernels.triton.delivery import deliver_words
from coppice.kernels.triton.dependent import offered
from coppice.kernels.triton.experts import gate_experts, weigh_experts
from coppice.kernels.triton.levels import gather_pages, merge_levels
from coppice.kernels.triton.merge import merge_partials
from coppice.kernels.triton.products import add_parts, multiply_rows, part_inputs
from coppice.kernels.triton.rows import (
    norm_rows,
    quantize_rows,
    silu_mul_levels,
    silu_mul_rows,
)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
INTS = ("items", "item_rows", "item_slots", "positions", "page_table", "merges", "count")
FLOATS = ("lse", "partial_out", "partial_lse", "k_scales", "v_scales", "scales")
LONGS = ("slots", "caches", "pages", "branches")


@dataclass(frozen=True)
class Variant:
    kernel: Any
    constants: dict[str, Any]
    dtype: str = "bf16"
    cache: str = "bf16"
    warps: int = 4
    stages: int = 3
    scalars: dict[str, str] = field(default_factory=dict)
    planned: int = 1  # programs of a multiprocessor, as the schedule counts on them

    def compiled(self) -> Any:
        names = list(self.kernel.arg_names)
        # Other versions of a kernel may have fewer constants, and are compared with this one.
        given = {"DEPENDENT": offered(), **self.constants}
        known = {name: value for name, value in given.items() if name in names}
        signature, attributes = {}, {}
        for at, name in enumerate(names):
            if name in known:
                signature[name] = "constexpr"
                continue
            if name in self.scalars:
                signature[name] = self.scalars[name]
            elif name in INTS:
                signature[name] = "*i32"
            elif name in FLOATS:
                signature[name] = "*fp32"
            elif name in LONGS:
                signature[name] = "*i64"
            else:
                signature[name] = "*" + (self.cache if name.endswith("_cache") else self.dtype)
            if signature[name][0] == "*" or name.endswith("_stride"):
                attributes[(at,)] = [["tt.divisibility", 16]]
        constants = {(names.index(name),): value for name, value in known.items()}
        source = ASTSource(self.kernel, signature=signature, constexprs=constants, attrs=attributes)
        options = {"num_warps": self.warps, "num_stages": self.stages}
        if known.get("DEPENDENT"):
            options["launch_pdl"] = True
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def attention(
    tile: Tile,
    head_dim: int,
    dtype: str = "bf16",
    *,
    cache: str | None = None,
    page_size: int = 16,
    group: int = 4,
    packed: int | None = None,
    windowed: bool = False,
    softcapped: bool = False,
    branched: bool = False,
    partial: bool = True,
    phased: bool | None = None,
    persistent: bool = False,
) -> Variant:
    cache = cache or dtype
    block_d, rest_d = head_blocks(head_dim, tile.queries, eight_bits=cache != dtype)
    constants = {
        "GROUP": group,
        "PACKED": packed or group,
        "KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "REST_D": rest_d,
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
        "PAGE_SIZE": page_size,
        "WINDOWED": windowed,
        "SOFTCAPPED": softcapped,
        "BRANCHED": branched,
        "SCALED": cache != dtype,
        "HALF": cache != dtype and dtype != "fp32",
        "PARTIAL": partial,
        "PHASED": tile.queries > 16 if phased is None else phased,
        "PERSISTENT": persistent,
        "UPCAST": False,
    }
    scalars = {
        "q_stride": "i32",
        "scale": "fp32",
        "softcap": "fp32",
        "window": "i32",
    }
    return Variant(
        attend_items, constants, dtype, cache, tile.warps, tile.stages, scalars, tile.resident
    )


def variants() -> dict[str, Variant]:
    """Every kernel, and attention at each width, type and feature at least once in each tile."""
    made: dict[str, Variant] = {}
    for head_dim in (64, 80, 96, 128, 192, 256):
        tiles = choose_tiles(head_dim, 2)
        made[f"prefill bf16 {head_dim}"] = attention(tiles.many, head_dim)
        made[f"decode bf16 {head_dim}"] = attention(tiles.few, head_dim)
    wide = choose_tiles(128, 2)
    for head_dim in (80, 96):
        made[f"prefill bf16 {head_dim} fp8 cache"] = attention(wide.many, head_dim, cache="fp8e4nv")
    for name, tile in (("prefill", wide.many), ("decode", wide.few)):
        made[f"{name} fp16 128"] = attention(tile, 128, "fp16")
        made[f"{name} bf16 128 all whole"] = attention(tile, 128, partial=False)
        made[f"{name} bf16 128 window softcap"] = attention(
            tile, 128, windowed=True, softcapped=True
        )
        made[f"{name} bf16 128 branched"] = attention(tile, 128, branched=True)
        made[f"{name} bf16 128 fp8 cache"] = attention(tile, 128, cache="fp8e4nv")
        made[f"{name} bf16 128 persistent"] = attention(tile, 128, persistent=True)
        made[f"{name} fp8 128 persistent"] = attention(tile, 128, cache="fp8e4nv", persistent=True)
        made[f"{name} bf16 128 page 1"] = attention(tile, 128, page_size=1)
        made[f"{name} bf16 128 page 256 group 7"] = attention(tile, 128, page_size=256, group=7)
    for group, packed in ((32, 32), (71, 36)):  # one KV head for all, as some models have it
        tiles = choose_tiles(64, 2, group)
        made[f"decode bf16 64 group {group}"] = attention(
            tiles.few, 64, group=group, packed=packed, phased=False
        )
        made[f"prefill bf16 64 group {group}"] = attention(
            tiles.many, 64, group=group, packed=packed
        )
    made["decode bf16 128 group 64"] = attention(
        choose_tiles(128, 2, 64).few, 128, group=64, phased=False
    )
    made["decode bf16 256 group 64"] = attention(
        choose_tiles(256, 2, 64).few, 256, group=64, phased=False
    )
    made["decode bf16 256 group 32"] = attention(
        choose_tiles(256, 2, 32).few, 256, group=32, phased=False
    )
    made["decode bf16 128 group 32"] = attention(
        choose_tiles(128, 2, 32).few, 128, group=32, phased=False
    )
    made["deterministic bf16 128"] = attention(wide.many, 128, phased=False)
    for head_dim in (64, 96, 128, 256):
        tiles = choose_tiles(head_dim, 4)
        made[f"prefill fp32 {head_dim}"] = attention(tiles.many, head_dim, "fp32")
        made[f"decode fp32 {head_dim}"] = attention(tiles.few, head_dim, "fp32")
    for head_dim in (80, 256):
        block = triton.next_power_of_2(head_dim)
        merge = {"HEADS": 32, "HEAD_DIM": head_dim, "BLOCK_D": block, "PARTS": 16}
        made[f"merge {head_dim}"] = Variant(merge_partials, merge)
    levels = {
        "HEADS": 32, "GROUP": 4, "HEAD_DIM": 128, "BLOCK_H": 16, "BLOCK_D": 128, "PLACED": True,
        "SCALED": True,
    }  # fmt: skip
    numbers = {"rows": "i32", "levels": "i32", "bounds": "*i32", "places": "*i64"}
    numbers |= {"parts_lse": "*fp32", "v_scales": "*fp32"}
    made["levels"] = Variant(merge_levels, levels, scalars=numbers)
    runs = dict.fromkeys(("tables", "starts", "counts", "begins", "pages"), "*i32")
    made["gather"] = Variant(gather_pages, {"BLOCK": 512}, scalars=runs)
    delivered = {"words": "*i32", "blocks": "*i64"}
    made["deliver"] = Variant(deliver_words, {"BLOCK": 1024}, scalars=delivered)
    strides = {"k_stride": "i32", "v_stride": "i32", "heads_stride": "i32", "eps": "fp32"}
    for cache in ("bf16", "fp8e4nv"):
        scaled = {"SCALED": cache != "bf16", "INTERPRETED": False}
        write = {"WIDTH": 1024, "BLOCK": 1024, "HEAD_DIM": 128, **scaled}
        made[f"write {cache}"] = Variant(write_rows, write, cache=cache, scalars=strides)
        turn = {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_H": 16, "BLOCK_D": 128}
        for normed in (False, True):
            made[f"rotate {cache}" + " normed" * normed] = Variant(
                rotate_rows, {**turn, "NORMED": normed, **scaled}, cache=cache, scalars=strides
            )
    copy = {"WORDS": 16384, "BLOCK": 1024}
    made["copy"] = Variant(copy_page_words, copy, scalars={"num_copies": "i32"})
    norm = {"HEADS": 1, "WEIGHT_ROWS": 1, "WIDTH": 4096, "BLOCK": 4096, "ADDS": True}
    for levels in (False, True):
        made["norm" + " e4m3" * levels] = Variant(
            norm_rows,
            {**norm, "LEVELS": levels, "INTERPRETED": False},
            warps=16,
            scalars={"x_stride": "i32", "eps": "fp32", "out": "*fp8e4nv" if levels else "*bf16"},
        )
    made["silu e4m3"] = Variant(
        silu_mul_levels,
        {"WIDTH": 14336, "BLOCK": 16384, "INTERPRETED": False},
        warps=16,
        scalars={"levels": "*fp8e4nv"},
    )
    made["silu"] = Variant(silu_mul_rows, {"WIDTH": 14336, "BLOCK": 1024})
    for dtype in ("bf16", "fp32"):
        product = product_tile(ITEMSIZE[dtype])
        constants = {
            "INPUTS": 4096, "OUTPUTS": 4096, "ROWS": product.rows, "COLUMNS": product.columns,
            "STEP": product.step, "PART": part_inputs(4096, 4096, product), "BIASED": True,
            "UPCAST": False,
        }  # fmt: skip
        for divided in (False, True):
            scalars = {"rows": "i32", "x_stride": "i32"}
            if divided:
                scalars["out"] = "*fp32"
            made[f"product {dtype}" + " divided" * divided] = Variant(
                multiply_rows, constants | {"DIVIDED": divided}, dtype, warps=product.warps,
                stages=product.stages, scalars=scalars,
            )  # fmt: skip
    adding = {"OUTPUTS": 4096, "PARTS": 4, "BLOCK": 1024, "BIASED": True}
    made["parts"] = Variant(add_parts, adding, scalars={"parts": "*fp32", "rows": "i32"})
    for dtype, rows in (("bf16", 1), ("bf16", 64), ("fp32", 64)):
        product = expert_tile(ITEMSIZE[dtype], rows, deterministic=False)
        constants = {
            "HIDDEN": 2880, "INNER": 2880, "ROWS": product.rows, "COLUMNS": product.columns,
            "STEP": product.step, "BIASED": True, "UPCAST": False,
        }  # fmt: skip
        scalars = {"num_blocks": "i32", "order": "*i64", "blocks": "*i32", "shares": "*fp32"}
        few = "few" if product.rows == 16 else "many"
        made[f"expert down {dtype} {few}"] = Variant(
            weigh_experts, constants, dtype, warps=product.warps, stages=product.stages,
            scalars=scalars,
        )  # fmt: skip
        scalars |= {"x_stride": "i32", "alpha": "fp32", "limit": "fp32"}
        for bounded in (False, True):
            name = f"expert gate {dtype} {few}" + " bounded" * bounded
            made[name] = Variant(
                gate_experts, constants | {"CHOSEN": 4, "BOUNDED": bounded}, dtype,
                warps=product.warps, stages=product.stages, scalars=scalars,
            )  # fmt: skip
    quantize = {"WIDTH": 14336, "BLOCK": 16384, "INTERPRETED": False}
    made["quantize"] = Variant(
        quantize_rows, quantize, warps=16, scalars={"x_stride": "i32", "levels": "*fp8e4nv"}
    )
    choice = {"logits": "*fp32", "columns": "*fp64", "tokens": "*i64", "stride": "i32",
              "vocabulary": "i32", "best": "*fp32", "tops": "*fp32", "places": "*i32",
              "counts": "*i32", "sums": "*i64", "state": "*i64", "masses": "*i64",
              "kept": "*i64", "same": "*i32"}  # fmt: skip
    shape = {"PARTS": 16, "BLOCK": 4096}
    filters = {"COLUMNS": 5, "FEW_K": True, "FEW_P": True}
    for name, kernel, constants in (
        ("greatest", greatest, {"COLUMNS": 5, "GROUPS": 1}),
        ("greatest of groups", greatest, {"COLUMNS": 5, "GROUPS": 64}),
        ("count", count_keys, {"COLUMNS": 5, "GROUPS": 64, "LEVEL": 0}),
        ("count again", count_keys, {"COLUMNS": 5, "GROUPS": 64, "LEVEL": 2}),
        ("weigh", weigh_keys, {"COLUMNS": 5, "FEW_K": False, "LEVEL": 0}),
        ("weigh again", weigh_keys, {"COLUMNS": 5, "FEW_K": True, "LEVEL": 2}),
        ("keep", keep, filters),
        ("draw", draw, {"COLUMNS": 5}),
    ):
        made[f"choice {name}"] = Variant(kernel, constants | shape, warps=8, scalars=choice)
    return made


def of_a_model(name: str) -> dict[str, Variant]:
    """Attention of one model: its prefill and its decode, by their names."""
    found = re.fullmatch(r"model (\d+) group (\d+)( window)?( softcap)?", name)
    if found is None:
        raise SystemExit(f"no variant is named {name!r}")
    head_dim, group = int(found[1]), int(found[2])
    tiles = choose_tiles(head_dim, 2, group)
    features: dict[str, Any] = {"windowed": bool(found[3]), "softcapped": bool(found[4])}
    return {
        f"{kind} bf16 {name}": attention(tile, head_dim, group=group, **features)
        for kind, tile in (("prefill", tiles.many), ("decode", tiles.few))
    }


def measured(name: str, variant: Variant) -> dict[str, Any]:
    started = time.process_time()
    compiled = variant.compiled()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", "-sass", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", code))
    ahead = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", compiled.asm["ttgir"])
    waits = re.findall(r"async_wait .*?\{num = (\d+)", compiled.asm["ttgir"])
    threads = 32 * variant.warps
    registers = -(-int(found["REG"]) // 8) * 8
    return {
        "name": name,
        "registers": int(found["REG"]),
        "stack": int(found["STACK"]),
        "local": int(found["LOCAL"]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "unset": unset_registers(code),
        "shared": compiled.metadata.shared,
        "queries": variant.constants.get("QUERIES", variant.constants.get("ROWS")),
        "wgmma": len(re.findall(r"\bHGMMA\b", code)),
        "mma": len(re.findall(r"\bHMMA\b", code)),
        "dependent": "griddepcontrol.wait" in compiled.asm["ptx"],
        "resident": min(
            65536 // (registers * threads), 228 * 1024 // (compiled.metadata.shared + 1024)
        ),
        "planned": variant.planned,
        "tiles": tile_loops(code),
        "buffers": min(map(int, ahead), default=0),
        "wait": max(map(int, waits), default=0),
        "seconds": round(time.process_time() - started, 1),
    }


def unset_registers(code: str) -> list[str]:
    """The uniform registers that an instruction of SASS reads, and none before it writes.

    They should be none. CUDA 12.8's ptxas lost copies of the places of operands in shared memory.
    """
    written: set[int] = set()
    unset: set[int] = set()
    lines = re.findall(
        r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", code, re.MULTILINE
    )
    for name, arguments in lines:
        pairs = name.startswith("U") and ".64" in name
        wide = pairs or name.startswith("UIMAD.WIDE")  # its factors are single registers
        target = re.match(r"UR(\d+)\b", arguments)
        rest = arguments[target.end() :] if target else arguments
        for kind, number in re.findall(r"(g?desc\[)?\bUR(\d+)\b", rest):
            # A product's second operand is described by the second pair of four registers.
            first = int(number) + (2 if kind == "gdesc[" else 0)
            unset |= set(range(first, first + (2 if kind or pairs else 1))) - written
        if target:
            written |= set(range(int(target[1]), int(target[1]) + (2 if wide else 1)))
    return [f"UR{number}" for number in sorted(unset)]


def tile_loops(code: str) -> list[int]:
    """The instructions of each innermost loop that multiplies, in SASS."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", code, re.MULTILINE)
    at = [int(address, 16) for address, _ in lines]
    loops: list[tuple[int, int]] = []
    for place, (_, line) in enumerate(lines):
        jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", line)
        if jump is None or int(jump[1], 16) >= at[place]:
            continue
        first = at.index(int(jump[1], 16))
        body = [text for _, text in lines[first : place + 1]]
        if any(re.search(r"\b(?:HGMMA|HMMA|FFMA)\b", text) for text in body):
            loops.append((first, place))
    inner = [
        (first, last)
        for first, last in loops
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in loops)
    ]
    return [last - first + 1 for first, last in inner]


#: What ``--table`` shows.
SHOWN = (
    "decode bf16 64", "decode bf16 128", "decode bf16 128 fp8 cache", "decode bf16 256",
    "decode bf16 128 group 32", "decode bf16 128 group 64", "deterministic bf16 128",
    "prefill bf16 64", "prefill bf16 128", "prefill bf16 128 fp8 cache", "prefill bf16 256",
    "product bf16", "product bf16 divided",
)  # fmt: skip


def print_table(made: dict[str, Variant]) -> None:
    print("| kernel | stages | buffers | wait | registers | shared KiB | programs | instructions |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in SHOWN:
        row = measured(name, made[name])
        loops = " and ".join(map(str, row["tiles"]))
        print(
            f"| {name} | {made[name].stages} | {row['buffers']} | {row['wait']} | "
            f"{row['registers']} | {row['shared'] / 1024:.0f} | {row['resident']} | {loops} |"
        )


def main() -> None:
    made = variants()
    if "--table" in sys.argv:
        print_table(made)
        return
    if "--list" in sys.argv:
        print("\n".join(made))
        return
    for name in sys.argv[1:] or made:
        for own, variant in ({name: made[name]} if name in made else of_a_model(name)).items():
            print(json.dumps(measured(own, variant)), flush=True)


if __name__ == "__main__":
    main()
