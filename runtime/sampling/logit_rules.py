"""The rules by which requests change logits: penalties, biases, bans, grammars, functions, budgets.

Every row of a batch follows its own rules. They are gathered into flat arrays of (row, token,
value), so that each kind is one operation over the batch, and rows without rules are not touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from copy import copy

import numpy as np
import torch

from coppice.kernels.transfer import send
from coppice.runtime.requests.request import Sequence
from coppice.runtime.requests.sampling_params import LogitsProcessor, SamplingParams
from coppice.runtime.sampling.grammars import CompiledGrammar, GrammarState, forbid_other_tokens
from coppice.runtime.sampling.thinking import Thinking
from coppice.runtime.sampling.token_rules import BadWords, TokenCounts


class LogitRules:
    """The rules of one sequence, prepared from its parameters for use at every token."""

    __slots__ = ("allowed", "bad_words", "bias", "biased", "counts", "empty", "grammar",
                 "processors", "thinking")  # fmt: skip

    def __init__(
        self,
        params: SamplingParams,
        prompt: Iterable[int],
        grammar: CompiledGrammar | None = None,
    ) -> None:
        repetition = params.repetition_penalty != 1
        penalised = repetition or params.presence_penalty != 0 or params.frequency_penalty != 0
        # Only the repetition penalty reads the prompt: a long one costs nothing otherwise.
        self.counts = TokenCounts(prompt if repetition else ()) if penalised else None
        bias = params.logit_bias or {}
        self.biased = np.array(list(bias), np.int64)
        self.bias = np.array(list(bias.values()), np.float32)
        allowed = params.allowed_token_ids
        self.allowed = None if allowed is None else np.array(list(allowed), np.int64)
        words = tuple(map(tuple, params.bad_words_token_ids or ()))
        self.bad_words = BadWords(words) if words else None
        self.processors = [(each, _wants_prompt(each)) for each in params.logits_processors or ()]
        self.grammar = None if grammar is None else GrammarState(grammar)
        self.thinking = Thinking.of(params)
        self.empty = not (
            penalised or bias or allowed or words or self.processors or self.grammar
            or self.thinking
        )  # fmt: skip

    def forked(self) -> LogitRules:
        """The rules of a sequence that continues from the same tokens."""
        if self.counts is None and self.grammar is None and self.thinking is None:
            return self  # what never changes is shared
        other = copy(self)
        other.counts = None if self.counts is None else self.counts.copy()
        other.grammar = None if self.grammar is None else self.grammar.forked()
        other.thinking = copy(self.thinking)
        return other


def _wants_prompt(processor: LogitsProcessor) -> bool:
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):  # a C function without a signature
        return False
    required = [
        each
        for each in parameters
        if each.default is each.empty
        and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) == 3


_CHOICES = 4  # of tokens that a model may try before the shortest completion is taken

#: The error of a row in which no token may be chosen.
NO_CHOICE = (
    "no token is left to choose: allowed_token_ids, bad_words, min_tokens, structured_outputs and "
    "logits_processors rule them all out, or a processor made a logit infinite or NaN"
)


def apply_rules(
    logits: torch.Tensor,
    sequences: Seq[Sequence],
    eos_token_ids: Seq[int],
    rows: Seq[int] | None = None,
) -> tuple[dict[int, str], list[int], torch.Tensor]:
    """Changes `logits` as `change_logits` does, so that a token can be chosen in every row.

    Returns the errors, by row; the rows in which the rules may leave no token; and for each of
    these whether one is left, bool on the device. Rows with an error or without a token are set to
    0, so the tokens chosen there are not valid.
    """
    errors, strict = change_logits(logits, sequences, eos_token_ids, rows)
    for row in errors:
        logits[row] = 0.0  # must not disturb the choice in the other rows
    if not strict:
        return errors, strict, torch.empty(0, dtype=torch.bool, device=logits.device)
    (index,) = send([np.array(strict, np.int64)], logits.device)
    some = logits.index_select(0, index)
    choice = some.amax(dim=-1).isfinite()
    logits.index_copy_(0, index, some.masked_fill_(~choice.unsqueeze(1), 0.0))
    return errors, strict, choice


def may_have_rules(sequence: Sequence) -> bool:
    """Whether a sequence has parameters that `change_logits` applies."""
    request = sequence.request
    params = request.params
    return bool(
        request.grammar is not None
        or params.min_tokens
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words_token_ids
        or params.logits_processors
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.thinking_token_budget is not None
    )


def change_logits(
    logits: torch.Tensor,
    sequences: Seq[Sequence],
    eos_token_ids: Seq[int],
    rows: Seq[int] | None = None,
) -> tuple[dict[int, str], list[int]]:
    """Changes `logits`, float32 [R, vocabulary], in place by the rules of each row's sequence.

    The order is vLLM's: functions, biases, penalties (repetition, then frequency and presence);
    tokens are forbidden last here, so that nothing can allow them again, but for the end of
    reasoning that is over its budget. `min_tokens` forbids those that would end a sequence early.
    `rows` are those that may have rules; None: all.

    Returns the errors, by row (a function failed; the row's logits are undefined), and the rows in
    which the rules may leave no token. Costs O(entries of the rules), and O(vocabulary) for rows
    where tokens are forbidden.
    """
    ruled: list[tuple[int, LogitRules]] = []
    banned: list[tuple[int, Seq[int]]] = []
    for row in range(len(sequences)) if rows is None else rows:
        sequence = sequences[row]
        rules = _rules_of(sequence)
        if not rules.empty:
            ruled.append((row, rules))
        if ends := _early_ends(sequence, eos_token_ids, logits.shape[1]):
            banned.append((row, ends))
    errors: dict[int, str] = {}
    if ruled:
        for row, rules in ruled:
            if rules.processors:
                error = _process(logits[row], sequences[row], rules)
                if error is not None:
                    errors[row] = error
        _add_biases(logits, ruled)
        _penalise(logits, ruled, sequences)
        for row, rules in ruled:
            words = rules.bad_words
            if words is not None and (
                bad := words.single + words.completing(sequences[row].tokens)
            ):
                banned.append((row, bad))
        _keep_allowed(logits, ruled)
        errors |= _keep_to_grammars(logits, ruled, sequences)
    _ban(logits, banned)
    _end_thinking(logits, ruled, sequences)
    strict = {
        row
        for row, rules in ruled
        if rules.allowed is not None or rules.processors or rules.grammar is not None
    }
    return errors, sorted(strict.union(row for row, _ in banned))


def leave_room(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    sequences: Seq[Sequence],
    rows: Seq[int],
    choose_again: Callable[[int], int],
) -> None:
    """Replaces chosen tokens after which JSON could not be completed before its sequence ends.

    `tokens` int64 [R] and `logits`, in which such tokens become -inf, are changed in place;
    `choose_again(row)` chooses by the logits as they are then. A completion that another rule
    forbids is not taken: the text stays incomplete. Waits for the device only for a row that is
    near its end.
    """
    for row in rows:
        sequence = sequences[row]
        rules = sequence.logit_rules
        if not isinstance(rules, LogitRules) or rules.grammar is None:
            continue
        ending, most = rules.grammar.ending, sequence.request.max_length
        prompt = len(sequence.request.prompt_token_ids)
        room = most - len(sequence.tokens)
        if ending is None or not ending.due(room, most - prompt):
            continue
        generated, chosen = sequence.tokens[prompt:].tolist(), int(tokens[row])
        token, tried = chosen, set()
        for _ in range(_CHOICES):
            if ending.fits(generated, token, room):
                break
            tried.add(token)
            logits[row, token] = -torch.inf
            if not logits[row].amax().isfinite():  # the form allows no other
                token = ending.forced(generated, room, chosen)
                break
            token = choose_again(row)
        else:
            token = ending.forced(generated, room, chosen)
        if token not in tried and not logits[row, token].isfinite():
            token = chosen  # the shortest completion has a token that another rule forbids
        if token != chosen:
            ending.cut = True
            tokens[row] = token


def was_cut(sequence: Sequence) -> bool:
    """Whether its text ended earlier than the model would have ended it."""
    rules = sequence.logit_rules
    grammar = rules.grammar if isinstance(rules, LogitRules) else None
    return grammar is not None and grammar.ending is not None and grammar.ending.cut


def _rules_of(sequence: Sequence) -> LogitRules:
    """The rules of a sequence, made at the first call."""
    rules = sequence.logit_rules
    if rules is None:
        request = sequence.request
        grammar = None if request.grammar is None else request.grammar.result()
        rules = LogitRules(request.params, request.prompt_token_ids, grammar)
        sequence.logit_rules = rules
    assert isinstance(rules, LogitRules)
    return rules


def _early_ends(sequence: Sequence, eos_token_ids: Seq[int], vocabulary: int) -> list[int]:
    params = sequence.request.params
    if sequence.num_generated >= params.min_tokens:
        return []
    ends = {*params.stop_ids, *(() if params.ignore_eos else eos_token_ids)}
    return [token for token in ends if token < vocabulary]


def _process(logits: torch.Tensor, sequence: Sequence, rules: LogitRules) -> str | None:
    """Runs a row's own functions; returns the error of the first that fails, else None."""
    prompt = sequence.request.prompt_token_ids.tolist()
    generated = sequence.tokens[len(prompt) :].tolist()
    for number, (processor, wants_prompt) in enumerate(rules.processors):
        tokens = (prompt, generated) if wants_prompt else (generated,)
        try:
            result = processor(*(list(each) for each in tokens), logits)
        except Exception as error:  # a user's function: only its own request may suffer
            return f"logits_processors[{number}] failed: {type(error).__name__}: {error}"
        if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
            got = tuple(result.shape) if isinstance(result, torch.Tensor) else result
            return (
                f"logits_processors[{number}] must return a tensor of shape "
                f"{tuple(logits.shape)}, got {got!r:.80}"
            )
        if result is not logits:
            logits.copy_(result)
    return None


def _add_biases(logits: torch.Tensor, ruled: Seq[tuple[int, LogitRules]]) -> None:
    entries = [(row, rules) for row, rules in ruled if len(rules.biased)]
    if entries:
        biases = np.concatenate([rules.bias for _, rules in entries])
        rows, tokens, bias = _places(
            logits, [(row, rules.biased) for row, rules in entries], biases
        )
        logits[rows, tokens] += bias


def _penalise(
    logits: torch.Tensor, ruled: Seq[tuple[int, LogitRules]], sequences: Seq[Sequence]
) -> None:
    tokens: list[tuple[int, Seq[int] | np.ndarray]] = []
    times, penalties = [], []
    for row, rules in ruled:
        if rules.counts is not None:
            rules.counts.update(sequences[row])
            if rules.counts.ids:
                params = sequences[row].request.params
                tokens.append((row, rules.counts.ids))
                times.append(np.array(rules.counts.times, np.float32))
                penalties.append(
                    (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
                )
    if not tokens:
        return
    lengths = [len(each) for each in times]
    spread = np.repeat(np.array(penalties, np.float32), lengths, axis=0)
    rows, places, each, count = _places(logits, tokens, spread, np.concatenate(times))
    repetition, frequency, presence = each.unbind(1)
    values = logits[rows, places]
    values = torch.where(values < 0, values * repetition, values / repetition)
    logits[rows, places] = values - count * frequency - (count > 0) * presence


def _keep_allowed(logits: torch.Tensor, ruled: Seq[tuple[int, LogitRules]]) -> None:
    entries = [(row, rules.allowed) for row, rules in ruled if rules.allowed is not None]
    if entries:
        whole = np.array([row for row, _ in entries], np.int64)
        rows, tokens, whole_rows = _places(logits, entries, whole)
        kept = logits[rows, tokens]
        logits.index_fill_(0, whole_rows, -torch.inf)
        logits[rows, tokens] = kept


def _keep_to_grammars(
    logits: torch.Tensor, ruled: Seq[tuple[int, LogitRules]], sequences: Seq[Sequence]
) -> dict[int, str]:
    """Forbids the tokens that grammars do not allow next; returns the errors, by row."""
    states = [(row, rules.grammar) for row, rules in ruled if rules.grammar is not None]
    if not states:
        return {}
    for row, state in states:
        state.update(sequences[row])
    forbid_other_tokens(logits, states)
    return {
        row: f"structured_outputs: the text cannot be followed: {state.matcher.get_error():.400}"
        for row, state in states
        if state.matcher.is_error()
    }


def _ban(logits: torch.Tensor, banned: Seq[tuple[int, Seq[int]]]) -> None:
    if banned:
        # `logits[rows, tokens] = -torch.inf` would copy the number to a GPU, and wait for it.
        logits.index_put_(tuple(_places(logits, banned)), logits.new_full((), -torch.inf))


def _end_thinking(
    logits: torch.Tensor, ruled: Seq[tuple[int, LogitRules]], sequences: Seq[Sequence]
) -> None:
    """Leaves only the end mark in rows whose reasoning has used up its budget."""
    ends = [
        (row, end)
        for row, rules in ruled
        if rules.thinking is not None and (end := rules.thinking.due(sequences[row])) is not None
    ]
    if ends:
        for row, end in ends:
            logits[row].fill_(-torch.inf)
            logits[row, end].fill_(0.0)  # assigned, the number would be copied to a GPU


def _places(
    logits: torch.Tensor, entries: Seq[tuple[int, Seq[int] | np.ndarray]], *more: np.ndarray
) -> list[torch.Tensor]:
    """Row and token id of every entry, as two flat indices int64; and `more`, sent with them."""
    tokens = [np.array(each, np.int64) for _, each in entries]
    rows = np.repeat([row for row, _ in entries], [len(each) for each in tokens])
    return send([rows.astype(np.int64), np.concatenate(tokens), *more], logits.device)
