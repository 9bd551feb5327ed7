"""Loading a tokenizer leaves transformers' models out, in versions of it that allow that."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A tokenizer that only AutoTokenizer can make: of a class of its own.
TOKENIZER = """
import json, shutil, sys, tempfile
from pathlib import Path
from coppice.frontend.text.tokenizer import DEMO_MODEL, Tokenizer
from coppice.runtime.startup.light_transformers import leave_out_torch, load_tokenizer

folder = Path(tempfile.mkdtemp()) / "model"
shutil.copytree(DEMO_MODEL, folder)
config = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen2"}
(folder / "config.json").write_text(json.dumps(config))
turns = [{"role": "user", "content": "Hello"}]

def works(tokenizer):
    assert "Hello" in tokenizer.apply_chat_template(turns, tokenize=False)
    assert tokenizer("Hello there")["input_ids"]
    shutil.rmtree(folder.parent)
"""


def run(code: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-c", TOKENIZER + code], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_a_tokenizer_comes_without_transformers_models() -> None:
    """With those come torch's compiler and its distributed tensors, seconds of a start."""
    run(
        """
works(load_tokenizer(str(folder)))
unwanted = {"torch._dynamo", "transformers.modeling_utils"} & set(sys.modules)
assert not unwanted, unwanted
from transformers.utils import import_utils, type_validators
assert import_utils.is_torch_available() and type_validators.is_torch_available()
type_validators.device_validator(type_validators.torch.device("cpu"))
import transformers
assert transformers.LlamaForCausalLM
"""
    )


def test_torch_stays_where_it_was_loaded_before() -> None:
    run(
        """
import torch
leave_out_torch()
works(load_tokenizer(str(folder)))
from transformers.utils import import_utils, is_torch_available, type_validators
assert is_torch_available() and import_utils.is_torch_available()
type_validators.device_validator(type_validators.torch.device("cpu"))
"""
    )


@pytest.mark.parametrize("first", ["", "leave_out_torch()"])
@pytest.mark.slow
def test_another_version_of_transformers_without_that_module(first: str) -> None:
    """It has nothing that could be left out: the tokenizer is loaded all the same."""
    run(
        f"""
import transformers.utils
class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers.utils.type_validators" and self.asked:
            self.asked = False
            raise ImportError(name)
    asked = True
sys.meta_path.insert(0, Without())
{first}
works(load_tokenizer(str(folder)))
assert not sys.meta_path[0].asked
"""
    )


@pytest.mark.slow
def test_another_version_of_transformers_that_does_not_ask_for_torch() -> None:
    run(
        """
import transformers.utils
from transformers.utils import import_utils
import transformers.utils.type_validators  # asks it when it is imported
for module in (transformers.utils, import_utils):
    del module.is_torch_available
leave_out_torch()
from coppice.runtime.startup import light_transformers
del sys.modules["transformers.utils.type_validators"]
light_transformers._leave_out_models()
assert not hasattr(import_utils, "is_torch_available")
"""
    )
