"""While a model is loaded, its process takes at most the result and one file of the checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from coppice.runtime.model.files.path import resolve_model

pytestmark = pytest.mark.slow
MIB = 2**20
SHARD = 48 * MIB  # of the results' 250 in 16 bits
MARGIN = 40 * MIB  # what torch and numpy keep for later, and a matrix while it is decoded
CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 1024,
    "intermediate_size": 2048, "vocab_size": 8192, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (1024, 1024), "self_attn.k_proj": (512, 1024),
    "self_attn.v_proj": (512, 1024), "self_attn.o_proj": (1024, 1024),
    "mlp.gate_proj": (2048, 1024), "mlp.up_proj": (2048, 1024), "mlp.down_proj": (1024, 2048),
}  # fmt: skip
# Linux counts in VmHWM the most that a process had at once, with the pages of files that it mapped.
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from coppice.runtime.model.config_file import load_model_config
from coppice.runtime.model.files.opening import open_tensors
from coppice.runtime.model.weights import load_decoder

def memory(name):
    line = next(x for x in open("/proc/self/status") if x.startswith(name + ":"))
    return int(line.split()[1]) * 1024

def load(folder):
    decoder = load_decoder(
        folder, load_model_config(folder), dtype=torch.float32, device=torch.device("cpu")
    )
    decoder.pack()
    result = sum({each.data_ptr(): each.nbytes for each in decoder.parameters()}.values())
    packed = [getattr(each, "packed", None) for each in decoder.modules()]
    return decoder, result + sum(each.memory.nbytes for each in packed if each is not None)

load(Path(sys.argv[1]))  # imports what loading imports
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM begins anew
before = memory("VmRSS")
decoder, result = load(Path(sys.argv[2]))
print(json.dumps([memory("VmHWM") - before, memory("VmRSS") - before, result]))
"""


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape).mul_(0.02).bfloat16()


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def plain(out: int, of: int) -> dict[str, torch.Tensor]:
    return {"weight": numbers(out, of)}


def gptq(out: int, of: int) -> dict[str, torch.Tensor]:
    return {
        "qweight": words(of // 8, out),
        "qzeros": words(of // 128, out // 8),
        "scales": torch.rand(of // 128, out).half(),
        "g_idx": torch.arange(of, dtype=torch.int32) // 128,
    }


def awq(out: int, of: int) -> dict[str, torch.Tensor]:
    return {
        "qweight": words(of, out // 8),
        "qzeros": words(of // 128, out // 8),
        "scales": torch.rand(of // 128, out).half(),
    }


def fp8(out: int, of: int) -> dict[str, torch.Tensor]:
    scale = torch.rand(-(-out // 128), -(-of // 128))
    return {"weight": numbers(out, of).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


METHODS: dict[str, tuple[Callable[[int, int], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "safetensors": (plain, {}),
    "pytorch_model.bin": (plain, {}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4}),
    "awq": (awq, {"quant_method": "awq", "bits": 4}),
    "fp8": (fp8, {"quant_method": "fp8"}),
}


def write(folder: Path, kind: str, layers: int) -> Path:
    """A checkpoint in shards of at most `SHARD` bytes."""
    make, described = METHODS[kind]
    pickled = kind == "pytorch_model.bin"
    name = "pytorch_model.bin" if pickled else "model.safetensors"
    folder.mkdir()
    config = CONFIG | {"num_hidden_layers": layers}
    if described:
        config["quantization_config"] = described
    (folder / "config.json").write_text(json.dumps(config))
    shard: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}

    def store() -> None:
        file = f"{len(set(files.values()))}-{name}"
        files.update(dict.fromkeys(shard, file))
        (torch.save if pickled else save_file)(dict(shard), folder / file)
        shard.clear()

    def tensors() -> Any:
        yield "model.embed_tokens.weight", numbers(8192, 1024)
        yield "model.norm.weight", numbers(1024)
        for layer in range(layers):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"model.layers.{layer}.{norm}.weight", numbers(1024)
            for module, shape in SHAPES.items():
                for part, tensor in make(*shape).items():
                    yield f"model.layers.{layer}.{module}.{part}", tensor

    for key, tensor in tensors():
        if sum(each.nbytes for each in shard.values()) + tensor.nbytes > SHARD:
            store()
        shard[key] = tensor
    store()
    (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def write_gguf(file: Path, layers: int) -> Path:
    """A GGUF file of Q8_0 blocks; it is one shard."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(512)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(2048)
    writer.add_embedding_length(1024)
    writer.add_head_count(16)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(8192)
    matrices = {"model.embed_tokens.weight": (8192, 1024)}
    vectors = ["model.norm.weight"]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        matrices |= {f"{at}.{module}.weight": shape for module, shape in SHAPES.items()}
        vectors += [f"{at}.input_layernorm.weight", f"{at}.post_attention_layernorm.weight"]
    for name in vectors:
        writer.add_tensor(names.get_name(name, (".weight",)), numbers(1024).float().numpy())
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, shape in matrices.items():
        blocks = gguf.quants.quantize(numbers(*shape).float().numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight",)), blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return resolve_model(str(file))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("kind", [*METHODS, "gguf"])
def test_the_result_and_one_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Blocks of a MiB and more go back when they are freed: how much malloc keeps for later depends
    # on what was compiled in the process before.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(MIB))
    if kind == "gguf":
        small, large = (write_gguf(tmp_path / f"{n}.gguf", n) for n in (1, 12))
    else:
        small, large = (write(tmp_path / str(n), kind, n) for n in (1, 12))
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, small, large], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    most, after, result = json.loads(ran.stdout.splitlines()[-1])
    print(kind, *(f"{each / MIB:.0f} MiB" for each in (most, after, result)))
    assert result > 75 * MIB, "else it says little"
    assert most <= result + SHARD + MARGIN
