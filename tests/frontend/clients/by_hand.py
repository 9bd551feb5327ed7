"""Clients that were tried by hand, against a server with a real model of 135M parameters.

The tests' environment does not have them. `make clients` writes the rows into docs/clients.md; who
tries one again renews its row.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tried:
    """One client.

    Attributes:
        version: of the client that was tried.
        date: on which day, as year-month-day.
        did: what worked, in a few words.
        surprises: what did not, or needs care; empty if nothing.
    """

    client: str
    version: str
    date: str
    did: str
    surprises: str = ""


TRIED: tuple[Tried, ...] = (
    Tried("aider-chat", "0.86.2", "2026-11-23", "whole and streamed answers, an edit", ""),
    Tried(
        "crewai",
        "1.15.30",
        "2026-11-23",
        "text, streams, schemas, crews with and without tools",
        "",
    ),
    Tried(
        "dspy",
        "3.4.1",
        "2026-11-23",
        "text, `n`, logprobs, responses, completions, embeddings",
        "so small a model misses its forms of answers",
    ),
    Tried(
        "genai-bench",
        "0.0.5",
        "2026-11-23",
        "a run with two streams",
        "streams that it closes before their end are logged as 499",
    ),
    Tried(
        "guidance",
        "0.3.1",
        "2026-11-23",
        "chats and schemas as `models.OpenAI`",
        "as `VLLMModel` it writes a grammar under two names, which was refused then",
    ),
    Tried(
        "guidellm",
        "0.8.1",
        "2026-11-23",
        "a run of streamed chats, two at a time (on the demo's model)",
        "",
    ),
    Tried(
        "haystack-ai",
        "3.4.0",
        "2026-11-23",
        "text, streams, tools, schemas, agents, responses, embeddings",
        "",
    ),
    Tried(
        "llama-index-llms-openai-like",
        "0.8.1",
        "2026-11-23",
        "text, streams, tools, agents, schemas, logprobs, responses, embeddings",
        "",
    ),
    Tried(
        "llm",
        "0.36",
        "2026-11-23",
        "text, streams, conversations, schemas, completions, JSON; tools were offered, "
        "none was called",
        "`reasoning_effort` is refused for a model that does not reason",
    ),
    Tried(
        "lm-eval",
        "0.4.13",
        "2026-11-23",
        "multiple choice, generation and rolling loglikelihood over completions, "
        "generation over chats",
        "",
    ),
    Tried(
        "outlines",
        "1.3.3",
        "2026-11-23",
        "text, streams and schemas as for OpenAI, vLLM and SGLang; expressions, choices, "
        "grammars as for the last two",
        "grammars of Lark whose rules begin with `?` were refused then",
    ),
    Tried(
        "semantic-kernel",
        "1.45.0",
        "2026-11-23",
        "text, streams, tools, schemas",
        "it takes a response that reaches its limit for a failure; an agent without "
        "`max_tokens` runs until the context is full",
    ),
    Tried(
        "smolagents",
        "1.26.0",
        "2026-11-23",
        "text, streams, stop strings, tools, agents, schemas",
        "",
    ),
    Tried(
        "vllm bench serve",
        "0.32.0",
        "2026-11-23",
        "random prompts to completions, repeated prefixes to chats (on the demo's model)",
        "",
    ),
)
