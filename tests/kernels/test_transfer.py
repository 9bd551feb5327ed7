"""What a step sends together comes to its places, by one transfer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coppice.kernels import transfer
from coppice.kernels.transfer import Landing, Outbox
from coppice.kernels.triton import delivery
from coppice.kernels.triton.base import INTERPRETED
from coppice.kernels.triton.delivery import Blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fill(outbox: Outbox) -> tuple[list, Landing, torch.Tensor]:
    """Two arrays, three of a landing that is filled in part, and words of a table."""
    rng = np.random.default_rng(0)
    added = [rng.integers(0, 99, 5), rng.integers(0, 99, (7, 3)).astype(np.int32)]
    parcel = outbox.add(added)
    shapes = [((40, 8), np.int32), ((6,), np.int64), ((3,), np.int32), ((4,), np.int32)]
    memory = torch.full((Landing.size(shapes),), 1, dtype=torch.uint8, device=DEVICE)
    landing = Landing(shapes, memory)
    filled = [
        rng.integers(0, 99, (33, 8)).astype(np.int32),
        rng.integers(0, 2**60, 6),
        np.zeros(0, np.int32),
        np.array([5, 6], np.int32),
    ]
    assert outbox.put(landing, filled)
    assert not outbox.put(landing, [*filled[:3], np.zeros(5, np.int32)])
    table = torch.zeros(300, dtype=torch.int32, device=DEVICE)
    places = rng.permutation(300)[:200].astype(np.int32)
    values = rng.integers(1, 99, 200).astype(np.int32)
    outbox.write(table, places, values)
    outbox.write(table, places[:0], values[:0])
    expected = np.zeros(300, np.int32)
    expected[places] = values

    def check() -> None:
        for tensor, array in zip(parcel.tensors, added, strict=True):
            assert np.array_equal(tensor.cpu().numpy(), array)
        for tensor, array in zip(landing.arrays, filled, strict=True):
            found = tensor.cpu().numpy()
            assert np.array_equal(found[: len(array)], array)
            assert (found[len(array) :] == 0x01010101).all(), "the rest is as it was"
        assert np.array_equal(table.cpu().numpy(), expected)

    outbox.then(check)
    return added, landing, table


def test_everything_comes_to_its_place():
    outbox = Outbox(DEVICE)
    added, _, _ = fill(outbox)
    outbox.send()
    added[0][:] = -1  # later changes do not reach what was sent


@pytest.mark.parametrize("block", [8, 1024])
@pytest.mark.parametrize("deliverer", [None, Blocks(DEVICE)], ids=["torch", "kernel"])
def test_so_it_does_packed_as_for_a_gpu(monkeypatch, deliverer, block):
    if deliverer is not None and DEVICE.type == "cpu" and not INTERPRETED:
        pytest.skip("Triton compiles its kernels, and there is no GPU")
    monkeypatch.setattr(delivery, "_BLOCK", block)
    monkeypatch.setattr(Outbox, "packs", True)
    outbox = Outbox(DEVICE, deliverer)
    fill(outbox)
    outbox.send()


def test_nothing_is_sent_where_there_is_nothing(monkeypatch):
    monkeypatch.setattr(transfer, "_packed", lambda *given: pytest.fail("something is sent"))
    outbox = Outbox(torch.device("meta"))
    outbox.write(torch.zeros(3, dtype=torch.int32), *np.zeros((2, 0), np.int32))
    outbox.send()


class Copies(TorchDispatchMode):
    """Counts the transfers to a device without values."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        result = function(*arguments, **options)
        given = [each for each in arguments if torch.is_tensor(each)]
        if given and torch.is_tensor(result) and result.is_meta and not given[-1].is_meta:
            self.sent += 1
        return result


def test_it_is_one_transfer():
    meta = torch.device("meta")
    outbox = Outbox(meta)
    shapes = [((4,), np.int32)] * 2
    landing = Landing(shapes, torch.empty(Landing.size(shapes), dtype=torch.uint8, device=meta))
    with Copies() as copies:
        outbox.add([np.arange(5), np.arange(3)])
        assert outbox.put(landing, [np.zeros(4, np.int32)] * 2)
        table = torch.empty(9, dtype=torch.int32, device=meta)
        outbox.write(table, np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32))
        outbox.send()
    assert copies.sent == 1
