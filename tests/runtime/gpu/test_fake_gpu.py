"""A step on a GPU that is not there: what would mix devices, and what would make the host wait.

Tensors on torch's device ``meta`` have a shape but no values, so reading a value fails.
An operation on tensors of two devices, and a copy from the host that is not queued, fail here too.
With a GPU the same steps run on it, and torch reports what would wait.
"""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coppice.kernels.attention.interface import AttentionBackend, LayerCache
from coppice.kernels.transfer import Outbox
from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.decoder import Decoder
from coppice.runtime.requests.request import LATE, Request, Sequence
from coppice.runtime.requests.sampling_params import SamplingParams
from coppice.runtime.runner.batch import LateTokens, build_batch
from coppice.runtime.sampling.sampler import Sampler
from coppice.runtime.schedule.chunks import Chunk, Schedule

FAKE = torch.device("meta")
GPU = pytest.param(
    torch.device("cuda", 0),
    marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
)


class Copies(TorchDispatchMode):
    """Counts transfers to the device; fails for what mixes devices or makes the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        result = function(*arguments, **options)
        given = [each for each in tree_leaves((arguments, options)) if torch.is_tensor(each)]
        # A number may stay on the host: it is an argument of the launch.
        devices = {each.device for each in given if each.dim()}
        assert len(devices) < 2, f"{function} has tensors on {devices}"
        if torch.is_tensor(result) and devices not in (set(), {result.device}):
            assert result.device == FAKE, f"{function} brings a tensor back"
            assert options.get("non_blocking"), f"{function} makes the host wait"
            self.sent += 1
        return result


class NoKernels(AttentionBackend):
    """Stands for the Triton backend: it checks nothing and launches nothing."""

    name = "none"
    dtypes = (torch.float32,)

    def write_kv(self, k, v, cache, slots):
        assert len({each.device for each in (k, v, cache.k, slots)}) == 1

    def copy_pages(self, caches, src, dst):
        raise NotImplementedError

    def prepare(self, plan, *, num_pages=None, outbox=None):
        return plan

    def attend(self, q, k, v, cache, prepared, **options):
        return torch.empty_like(q, memory_format=torch.contiguous_format), q[..., 0].float()


class Waits:
    """While it is entered, torch fails for what makes the host wait for the GPU."""

    sent = None

    def __enter__(self) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(params=[FAKE, GPU], ids=["meta", "cuda"])
def device(request):
    return request.param


@pytest.fixture
def copies(request, monkeypatch):
    """To be entered; pinning, which needs a GPU, is left out without one."""
    if "device" in request.fixturenames and request.getfixturevalue("device") != FAKE:
        return Waits()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    return Copies()


def sequence(params, tokens, computed=0, prompt=3):
    request = Request("r", array("i", tokens[:prompt]), params, None, 0, 0, 100)
    made = Sequence(request)
    made.tokens = array("i", tokens)
    made.computed, made.table = computed, array("i", [1, 2, 3, 4])
    return made


@torch.inference_mode()
def test_one_transfer_takes_a_batch_over_and_the_model_waits_for_nothing(
    tiny_checkpoint, family, copies, device
):
    config = load_model_config(tiny_checkpoint(family))
    decoder = Decoder(config, dtype=torch.bfloat16, device=device)
    shape = (5, 4, config.num_kv_heads, config.head_dim)
    cache = LayerCache(*torch.empty(2, *shape, dtype=torch.bfloat16, device=device))
    greedy = SamplingParams(temperature=0)
    decode, chunk = sequence(greedy, [5] * 9, computed=8), sequence(greedy, [5] * 9, prompt=9)
    decode.tokens[-1] = LATE
    late = LateTokens(torch.zeros(3, dtype=torch.int64, device=device), {decode: 2})

    def step():
        batch = build_batch(Schedule([Chunk(decode, 1), Chunk(chunk, 6)]), 4, late)
        sent = batch.send(Outbox(device), late)
        return decoder(
            sent.token_ids, sent.positions, sent.slots, [cache] * config.num_layers,
            NoKernels(), batch.plan, sent.logit_rows,
        )  # fmt: skip

    if device != FAKE:
        step()  # compiles
    with copies:
        logits = step()
    assert (logits.device, logits.dtype) == (device, torch.float32)
    assert logits.shape == (1, config.vocab_size)
    assert copies.sent == (1 if device == FAKE else None)


@torch.inference_mode()
def test_rules_and_choice_of_tokens_wait_for_nothing(copies, device):
    sequences = [
        sequence(params, [5, 6, 7, 8])
        for params in (
            SamplingParams(temperature=0),
            SamplingParams(temperature=0.7),
            SamplingParams(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1),
            SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
            SamplingParams(logit_bias={3: 1.0}, allowed_token_ids=[3, 4, 5], min_tokens=5),
            SamplingParams(temperature=0, bad_words_token_ids=[[9], [7, 8, 10]]),
            SamplingParams(temperature=0, logprobs=3),
        )
    ]
    logits = torch.zeros(len(sequences), 40, device=device)
    if device != FAKE:
        Sampler((2,)).sample(logits.clone(), sequences)  # compiles
    with copies:
        sampling = Sampler((2,)).sample(logits, sequences)
    tokens = sampling.tokens
    assert (tokens.device, tokens.dtype, tokens.shape) == (device, torch.int64, (7,))
    if device != FAKE:
        assert all(0 <= token < 40 for token in sampling.read().tokens)
        return
    # Biases, penalties, what is allowed, what is banned; rows that may have no token left; rows and
    # numbers of the random choice; the rows with logprobs, before the choice and after.
    assert copies.sent == 8
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        sampling.read()


def test_what_would_wait_is_noticed(copies):
    logits = torch.empty(2, 40, device=FAKE)
    with copies, pytest.raises(AssertionError, match="makes the host wait"):
        torch.ones(3).to(FAKE)
    with copies, pytest.raises(AssertionError, match="has tensors on"):
        logits[torch.tensor([1])]
    with copies, pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        logits.argmax(dim=-1).tolist()
