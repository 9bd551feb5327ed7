"""Stands for FlashInfer where there is no GPU: what the attention backend calls of it, by torch.

Arguments are checked as FlashInfer and its kernels check them, and where those would silently read
elsewhere or wait for the device, more strictly. Plans are kept for tests. Attention is
float32 arithmetic, log-sum-exps are to base 2. In graph mode a run reads the wrapper's buffers, as
a replay does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from coppice.kernels.flashinfer import wrappers
from coppice.kernels.flashinfer.backend import FlashInferBackend
from coppice.kernels.schedule.cost import CostModel

HEAD_DIMS = (64, 128, 256, 512)
DECODE_GROUPS = (1, 2, 3, 4, 6, 8, 16)


class MissingJITCacheError(RuntimeError):
    """What FlashInfer raises where it may not compile and a kernel was not compiled before."""


@dataclass(frozen=True, eq=False)
class Case:
    """What FlashInfer has a compiled module for each of."""

    wrapper: str
    q: torch.dtype
    kv: torch.dtype
    head_dim: int
    windowed: bool
    softcapped: bool
    kernels: str = "fa2"


@dataclass(eq=False)
class Plan:
    """The arguments of one call of ``plan``."""

    query_indptr: torch.Tensor
    page_indptr: torch.Tensor
    page_indices: torch.Tensor
    last_page_len: torch.Tensor
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    causal: bool
    sm_scale: float | None
    window_left: int
    softcap: float
    q: torch.dtype
    kv: torch.dtype
    out: torch.dtype

    @property
    def kv_len(self) -> torch.Tensor:
        pages = self.page_indptr.diff()
        return (pages - 1).clamp(min=0) * self.page_size + self.last_page_len


class _Wrapper:
    def __init__(
        self, library, workspace, kv_layout, use_cuda_graph, kernels="fa2", **buffers
    ) -> None:
        assert workspace.dtype == torch.uint8 and workspace.data_ptr() % 16 == 0
        assert kv_layout == "NHD"
        self.library = library
        self.kernels = kernels
        self.workspace = workspace
        self.plans: list[Plan] = []
        self.buffers = buffers if use_cuda_graph else None
        self.rows: int | None = None
        if use_cuda_graph:
            groups = len(buffers["last_page_len"])
            for name in ("query_indptr", "page_indptr"):
                assert name not in buffers or buffers[name].shape == (groups + 1,), name
            assert all(each.dtype == torch.int32 for each in buffers.values())
        else:
            assert not any(torch.is_tensor(each) for each in buffers.values())
        library.wrappers.append(self)

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer) -> None:
        self.workspace = float_workspace_buffer
        assert (
            int_workspace_buffer.dtype == torch.uint8 and int_workspace_buffer.data_ptr() % 16 == 0
        )

    def _place(self, plan: Plan) -> Plan:
        """In graph mode: the plan over the wrapper's own buffers, which are filled from it."""
        if self.buffers is None:
            return plan
        if len(plan.last_page_len) != len(self.buffers["last_page_len"]):
            raise ValueError("The batch size should be fixed in cudagraph mode")
        if len(plan.page_indices) > len(self.buffers["page_indices"]):
            raise ValueError("The length of paged_kv_indices exceeds the allocated buffer size.")
        rows = int(plan.query_indptr[-1])
        assert self.rows in (None, rows), "grids are captured, and follow from the number of rows"
        self.rows = rows
        for name, buffer in self.buffers.items():
            array = getattr(plan, name)
            buffer[: len(array)].copy_(array)
        return replace(plan, **self.buffers)

    def _keep(self, plan: Plan, seq_lens: torch.Tensor | None) -> None:
        groups = len(plan.last_page_len)
        on_host = {
            "query_indptr": (plan.query_indptr, groups + 1),
            "page_indptr": (plan.page_indptr, groups + 1),
            "last_page_len": (plan.last_page_len, groups),
            "seq_lens": (seq_lens, groups),
        }
        for name, (array, length) in on_host.items():
            assert array is not None and array.shape == (length,), name
            assert array.dtype == torch.int32 and array.is_contiguous(), name
            assert array.device.type == "cpu", f"{name} makes the host wait for the device"
        indices = plan.page_indices
        assert indices.dtype == torch.int32 and indices.device == self.workspace.device
        for name in ("query_indptr", "page_indptr"):
            array = getattr(plan, name)
            assert array[0] == 0 and (array.diff() >= 0).all(), f"{name} must not fall"
        no_rows = plan.query_indptr.diff() == 0
        assert self.buffers is not None or not no_rows.any(), "a group has no rows"
        assert (plan.page_indptr.diff()[no_rows] == 0).all()
        assert plan.page_indptr[-1] == len(indices)
        empty = plan.page_indptr.diff() == 0
        last = plan.last_page_len
        assert (last[empty] == 0).all()
        assert ((last[~empty] >= 1) & (last[~empty] <= plan.page_size)).all()
        assert torch.equal(plan.kv_len, seq_lens)
        if plan.causal:
            assert (plan.kv_len >= plan.query_indptr.diff()).all()
        if plan.heads % plan.kv_heads:
            raise RuntimeError("num_qo_heads should be divisible by num_kv_heads")
        if plan.head_dim not in HEAD_DIMS:
            raise RuntimeError(f"Unsupported head_dim: {plan.head_dim}")
        assert plan.q in (torch.float16, torch.bfloat16) and plan.out == plan.q
        assert plan.kv in (plan.q, torch.float8_e4m3fn)
        case = Case(
            type(self).__name__, plan.q, plan.kv, plan.head_dim, plan.window_left >= 0,
            plan.softcap > 0, self.kernels,
        )  # fmt: skip
        if self.kernels == "fa3":
            assert plan.kv == plan.q, "fa3 reads no 8-bit cache with queries of 16 bits"
            assert self.buffers is None, "graphs are of decoding steps"
        if not self.library.compiled(case):
            raise MissingJITCacheError("JIT compilation is disabled\nand the module is missing")
        self.plans.append(self._place(plan))

    def _run(self, q, pages, out, lse, return_lse):
        plan = self.plans[-1]
        k_cache, v_cache = pages
        assert return_lse
        if len(q) != plan.query_indptr[-1]:
            raise ValueError(f"q.shape[0] ({len(q)}) does not match qo_indptr[-1]")
        for name, tensor, planned in (("q", q, plan.q), ("k", k_cache, plan.kv)):
            if tensor.dtype != planned:
                raise ValueError(f"The dtype of {name} does not match the planned {planned}")
        assert k_cache.stride() == v_cache.stride() and v_cache.dtype == plan.kv
        assert k_cache.shape[1:] == (plan.page_size, plan.kv_heads, plan.head_dim)
        assert q.shape[1:] == (plan.heads, plan.head_dim) and q.stride(2) == 1
        for given, dtype, shape in ((out, plan.out, q.shape), (lse, torch.float32, q.shape[:2])):
            assert given.dtype == dtype and given.shape == shape and given.is_contiguous()
            assert given.device == q.device
        scale = plan.head_dim**-0.5 if plan.sm_scale is None else plan.sm_scale
        for group in range(len(plan.last_page_len)):
            rows = slice(*plan.query_indptr[group : group + 2].tolist())
            first, stop = plan.page_indptr[group : group + 2].tolist()
            table = plan.page_indices[first:stop].long()
            length = int(plan.kv_len[group])
            keys, values = (
                each[table].flatten(0, 1)[:length].float().repeat_interleave(
                    plan.heads // plan.kv_heads, dim=1
                )
                for each in (k_cache, v_cache)
            )  # fmt: skip
            scores = torch.einsum("rhd,thd->rht", q[rows].float(), keys) * scale
            if plan.softcap > 0:
                scores = plan.softcap * (scores / plan.softcap).tanh()
            key = torch.arange(length, device=q.device)
            count = rows.stop - rows.start
            place = length - count + torch.arange(count, device=q.device)[:, None]
            seen = key <= place if plan.causal else torch.ones_like(key <= place)
            if plan.window_left >= 0:
                seen &= key + plan.window_left >= place
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
            sums = scores.logsumexp(-1)
            # Rows that see nothing get zeros, and weigh nothing in a merge.
            weights = torch.where(sums[..., None].isinf(), 0, (scores - sums[..., None]).exp())
            out[rows] = torch.einsum("rht,thd->rhd", weights, values).to(out.dtype)
            lse[rows] = sums / math.log(2)
        return out, lse


class Library(ModuleType):
    """The module ``flashinfer``, to be put into ``sys.modules``.

    ``compiled`` returns whether there is a module for a ``Case``; ``wrappers`` are all that were
    made.
    """

    def __init__(self, compiled=lambda case: True) -> None:
        super().__init__("flashinfer")
        self.compiled = compiled
        self.wrappers: list[_Wrapper] = []
        library = self

        class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
            def __init__(
                self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, *,
                qo_indptr_buf=None, paged_kv_indptr_buf=None, paged_kv_indices_buf=None,
                paged_kv_last_page_len_buf=None, backend="auto",
            ) -> None:  # fmt: skip
                assert backend in ("fa2", "fa3")
                super().__init__(
                    library, float_workspace_buffer, kv_layout, use_cuda_graph, backend,
                    query_indptr=qo_indptr_buf, page_indptr=paged_kv_indptr_buf,
                    page_indices=paged_kv_indices_buf, last_page_len=paged_kv_last_page_len_buf,
                )  # fmt: skip

            def plan(
                self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
                num_qo_heads, num_kv_heads, head_dim_qk, page_size, *, causal=False, sm_scale=None,
                window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
                o_data_type=None, non_blocking=True, seq_lens=None,
            ) -> None:  # fmt: skip
                q, kv, out = _types(q_data_type, kv_data_type, o_data_type)
                self._keep(
                    Plan(
                        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
                        num_qo_heads, num_kv_heads, head_dim_qk, page_size, causal, sm_scale,
                        window_left, logits_soft_cap or 0.0, q, kv, out,
                    ),
                    seq_lens,
                )  # fmt: skip

            def run(self, q, paged_kv_cache, *, out=None, lse=None, return_lse=False):
                return self._run(q, paged_kv_cache, out, lse, return_lse)

        class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
            def __init__(
                self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False,
                use_tensor_cores=False, paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None,
                paged_kv_last_page_len_buffer=None, backend="auto",
            ) -> None:  # fmt: skip
                assert not use_tensor_cores, "its array of rows is copied from pageable memory"
                assert backend == "fa2"
                assert not float_workspace_buffer.any(), "it must be zeros at its first use"
                super().__init__(
                    library, float_workspace_buffer, kv_layout, use_cuda_graph,
                    page_indptr=paged_kv_indptr_buffer, page_indices=paged_kv_indices_buffer,
                    last_page_len=paged_kv_last_page_len_buffer,
                )  # fmt: skip

            def plan(
                self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim,
                page_size, *, window_left=-1, logits_soft_cap=None, q_data_type="float16",
                kv_data_type=None, o_data_type=None, sm_scale=None, non_blocking=True,
                seq_lens=None,
            ) -> None:  # fmt: skip
                q, kv, out = _types(q_data_type, kv_data_type, o_data_type)
                if num_qo_heads // num_kv_heads not in DECODE_GROUPS:
                    raise RuntimeError(f"Unsupported group_size: {num_qo_heads // num_kv_heads}")
                assert (indptr.diff() > 0).all(), "a sequence without keys"
                rows = torch.arange(len(indptr), dtype=torch.int32)
                self._keep(
                    Plan(
                        rows, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim,
                        page_size, False, sm_scale, window_left, logits_soft_cap or 0.0, q, kv, out,
                    ),
                    seq_lens,
                )  # fmt: skip

            def run(self, q, paged_kv_cache, *, out=None, lse=None, return_lse=False):
                return self._run(q, paged_kv_cache, out, lse, return_lse)

        self.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
        self.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper

    @property
    def plans(self) -> list[Plan]:
        """The plans of all wrappers, each wrapper's latest last."""
        return [plan for wrapper in self.wrappers for plan in wrapper.plans]


def _types(q, kv, out) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    q = getattr(torch, q) if isinstance(q, str) else q
    return q, q if kv is None else kv, q if out is None else out


def share_all(monkeypatch) -> None:
    """Have FlashInfer's backend share all that sequences have in common, however short."""
    usual = FlashInferBackend.cost_model
    monkeypatch.setattr(CostModel, "row_bytes", 0)
    monkeypatch.setattr(
        FlashInferBackend, "cost_model", lambda *given: replace(usual(*given), launch_bytes=0)
    )


def gather_runs(tables, starts, counts, begins, pages, longest) -> None:
    """What the Triton kernel does."""
    assert longest == counts.max()
    for start, count, begin in zip(starts, counts, begins, strict=True):
        pages[begin : begin + count] = tables[start : start + count]


def merge_parts(parts, parts_lse, bounds, places, v_scales, group):
    """What the Triton kernel does."""
    place = torch.arange(parts.shape[1])[None]
    outside = (place < bounds[: len(parts), :1]) | (place >= bounds[: len(parts), 1:])
    logs = torch.where(outside[..., None], -torch.inf, parts_lse) * math.log(2)
    both = logs.logsumexp(0)
    shares = torch.where(logs.isinf(), 0, (logs - both).exp())[..., None]
    out = torch.where(shares == 0, 0, parts.float() * shares).sum(0)
    if v_scales is not None:
        out = out * v_scales.repeat_interleave(group)[:, None]
    out = out.to(parts.dtype)
    return (out, both) if places is None else (out[places], both[places])


def without_interpreter(monkeypatch) -> None:
    """Have torch do what Triton's kernels around FlashInfer's do, in a tenth of the time."""
    monkeypatch.setattr(wrappers, "gather_runs", gather_runs)
    monkeypatch.setattr(wrappers, "merge_parts", merge_parts)
