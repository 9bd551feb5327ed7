"""The choice of the attention backend, by the requested name, the device and the model.

Backends are imported when they are chosen: each needs libraries that may not be installed.
"""

from __future__ import annotations

import logging

import torch

from coppice.kernels.attention.interface import AttentionBackend, AttentionCase

_log = logging.getLogger(__name__)


def select_backend(
    name: str,
    device: torch.device,
    *,
    deterministic: bool = False,
    case: AttentionCase | None = None,
    flashinfer_kernels: str = "auto",
) -> AttentionBackend:
    """The backend of that name for that device; ``auto`` is the fastest one that works there.

    Names: ``auto``, ``cpu``, ``triton``, ``flashinfer``, ``reference`` (slow, for tests). On a GPU
    ``auto`` is ``flashinfer`` where that covers the ``case``, if one is given, else ``triton``, and
    the log gives the reason. ``flashinfer_kernels`` are the ``kernels`` of ``FlashInferBackend``.
    ``deterministic`` asks for results that depend neither on the rest of
    the batch nor on what was cached; ``triton`` offers it. Other names, a device that the backend
    does not run on, a case that it does not cover, and a backend that cannot be deterministic raise
    ``ValueError``.
    """
    names = ("auto", "cpu", "triton", "flashinfer", "reference")
    if name not in names:
        allowed = ", ".join(map(repr, names[:-1]))
        raise ValueError(f"attention_backend is {name!r}; it must be {allowed} or {names[-1]!r}")
    if name == "auto" and device.type == "cuda":
        if case is not None:
            try:
                backend = select_backend(
                    "flashinfer",
                    device,
                    deterministic=deterministic,
                    case=case,
                    flashinfer_kernels=flashinfer_kernels,
                )
            except ValueError as error:
                if flashinfer_kernels != "auto":
                    raise
                _log.info("attention runs on Triton, not on FlashInfer: %s", error)
            else:
                _log.info("attention runs on FlashInfer, which covers %s", case)
                return backend
        name = "triton"
    elif name == "auto":
        name = "cpu"
    if flashinfer_kernels != "auto" and name != "flashinfer":
        raise ValueError(
            f"flashinfer_kernels is {flashinfer_kernels!r}; attention_backend {name!r} takes only "
            "'auto'"
        )
    if deterministic and name != "triton":
        raise ValueError(
            f"deterministic is True; attention_backend {name!r} takes only False, 'triton' both"
        )
    if name in ("triton", "flashinfer"):
        try:
            from coppice.kernels.flashinfer.backend import FlashInferBackend
            from coppice.kernels.triton.backend import TritonBackend
        except ImportError as error:
            raise ValueError(
                f"attention_backend is {name!r}, but Triton is not installed here ({error}); "
                "install the extra 'gpu', or take 'cpu' for device cpu"
            ) from error
        if name == "flashinfer":
            return FlashInferBackend(device, case, kernels=flashinfer_kernels)
        return TritonBackend(device, deterministic=deterministic)
    if name == "reference":
        from coppice.kernels.attention.reference import ReferenceBackend

        return ReferenceBackend()
    if device.type != "cpu":
        raise ValueError(f"device is {device}; attention_backend {name!r} runs on 'cpu' only")
    from coppice.kernels.cpu.backend import CpuBackend

    return CpuBackend()
