"""The known formats of tool calls, and which of them a model uses."""

from __future__ import annotations

import re

from coppice.frontend.chat.tools.deepseek import DeepSeekFormat
from coppice.frontend.chat.tools.format import ToolFormat
from coppice.frontend.chat.tools.gpt_oss import GptOssFormat
from coppice.frontend.chat.tools.granite import GraniteFormat
from coppice.frontend.chat.tools.hermes import HermesFormat
from coppice.frontend.chat.tools.llama import LlamaFormat
from coppice.frontend.chat.tools.mistral import MistralFormat
from coppice.frontend.chat.tools.pythonic import PythonicFormat
from coppice.frontend.chat.tools.tagged.glm import GlmFormat
from coppice.frontend.chat.tools.tagged.qwen3_coder import Qwen3CoderFormat
from coppice.frontend.text.tokenizer import Tokenizer

FORMATS: dict[str, ToolFormat] = {
    "hermes": HermesFormat(),
    "llama": LlamaFormat(),
    "mistral": MistralFormat(),
    "qwen3_coder": Qwen3CoderFormat(),
    "deepseek_v3": DeepSeekFormat(fenced=True),
    "deepseek_v31": DeepSeekFormat(fenced=False),
    "gpt_oss": GptOssFormat(),
    "pythonic": PythonicFormat(),
    "glm45": GlmFormat(lines=True),
    "glm47": GlmFormat(lines=False),
    "granite": GraniteFormat(),
}

# The first expression that is found in a template decides.
_SIGNS = (
    (r"<function=", "qwen3_coder"),
    (r"</arg_key>(?:\n|\\n)", "glm45"),
    (r"<arg_key>", "glm47"),
    (r"<\|tool_call\|>", "granite"),
    (r"<tool_call>", "hermes"),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"(?s)<｜tool▁calls▁begin｜>.*```json", "deepseek_v3"),
    (r"<｜tool▁calls▁begin｜>", "deepseek_v31"),
    (r"<\|constrain\|>|to=functions", "gpt_oss"),
    (r"<\|python_start\|>|func(?:tion)?_name\d?\(", "pythonic"),
    (r'<\|python_tag\|>|"parameters"', "llama"),
)


def format_of(tokenizer: Tokenizer, chosen: str = "auto") -> ToolFormat | None:
    """The format of that name.

    "auto" finds it by the marks in the chat template. A template without a place for tools gets
    them in a system message, which asks for the first of the formats. None: the template has tools
    in a way that is not known here.
    """
    if chosen != "auto":
        return FORMATS[chosen]
    template = str(tokenizer.chat_template or "")
    for sign, name in _SIGNS:
        if re.search(sign, template):
            return FORMATS[name]
    return None if "tools" in template else FORMATS["hermes"]
