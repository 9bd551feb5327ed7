"""Which heads, widths and words of a model each rank has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from coppice.runtime.model.config import ModelConfig

# Widths are divided at multiples of the largest of these of which all ranks get as many, or `_MANY`
# each. They suit the panels of products, and groups of weights that share a scale.
_UNITS = (128, 64, 32, 16, 8, 4, 2, 1)
_MANY = 16


@dataclass(frozen=True, slots=True)
class Share:
    """What rank ``rank`` of ``size`` has of a model.

    Attributes:
        whole, part: the model, and a config with this rank's number of heads, inner widths and
            words.
        heads, kv_heads: the heads that it has. Ranks may have the same one of keys and values.
        first_of_kv: whether it is the first rank that has these heads of keys and values.
    """

    rank: int
    size: int
    whole: ModelConfig
    part: ModelConfig
    heads: range
    kv_heads: range
    first_of_kv: bool

    @property
    def words(self) -> range:
        """The tokens whose embeddings and logits it has."""
        return divided(self.whole.vocab_size, self.rank, self.size)

    @property
    def word_counts(self) -> list[int]:
        """How many tokens each rank has."""
        return [len(divided(self.whole.vocab_size, rank, self.size)) for rank in range(self.size)]

    def inner(self, width: int) -> range:
        """Its part of an inner width of the feed-forward part."""
        return divided(width, self.rank, self.size)


def divided(width: int, rank: int, size: int) -> range:
    """A rank's part of ``width`` neighbours; parts differ by at most one unit. O(1)."""
    fitting = [each for each in _UNITS if width % each == 0 and width // each >= size]
    even = [each for each in fitting if width // each % size == 0 or width // each >= _MANY * size]
    unit = [*even, *fitting, 1][0]
    units = width // unit
    return range(units * rank // size * unit, units * (rank + 1) // size * unit)


def divided_heads(heads: int, kv_heads: int, rank: int, size: int) -> tuple[range, range, bool]:
    """A rank's heads of queries, its heads of keys and values, whether it is the first with these.

    Where there are fewer heads of keys and values than ranks, several ranks have the same one, and
    each some of the queries that read it.
    """
    group = heads // kv_heads
    if kv_heads >= size:
        own = range(kv_heads * rank // size, kv_heads * (rank + 1) // size)
        return range(own.start * group, own.stop * group), own, True
    # The head whose ranks, from size * head // kv_heads on, this one is among.
    head = next(each for each in range(kv_heads) if rank < size * (each + 1) // kv_heads)
    first, last = size * head // kv_heads, size * (head + 1) // kv_heads
    place, ranks = rank - first, last - first
    begin, end = group * place // ranks, group * (place + 1) // ranks
    own = range(head, head + 1)
    return range(head * group + begin, head * group + end), own, place == 0


def check_division(config: ModelConfig, size: int) -> None:
    """Raises ValueError if a model can't be divided among ``size`` ranks."""
    widths = {
        f"{config.num_heads} heads": config.num_heads,
        f"a vocabulary of {config.vocab_size} tokens": config.vocab_size,
    }
    for layer in config.layers:
        width = config.intermediate_size if layer.experts is None else layer.experts.inner
        widths[f"an inner width of {width}"] = width
    what, most = min(widths.items(), key=lambda each: each[1])
    if size > most:
        raise ValueError(
            f"tensor_parallel_size is {size}; the model has {what}, so it must be at most {most}"
        )
    if size > 1 and config.implementation != "coppice":
        raise ValueError(
            f"tensor_parallel_size is {size}; with transformers' model (model_impl) it must be 1: "
            "only our own families are divided"
        )


def share_of(config: ModelConfig, rank: int, size: int) -> Share:
    """What a rank has of a model, for which ``check_division`` found nothing to refuse."""
    heads, kv_heads, first = divided_heads(config.num_heads, config.num_kv_heads, rank, size)
    if size == 1:
        return Share(rank, size, config, config, heads, kv_heads, first)

    def inner(width: int) -> int:
        return len(divided(width, rank, size))

    layers = tuple(
        layer
        if layer.experts is None
        else replace(layer, experts=replace(layer.experts, inner=inner(layer.experts.inner)))
        for layer in config.layers
    )
    part = replace(
        config,
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        intermediate_size=inner(config.intermediate_size),
        vocab_size=inner(config.vocab_size),
        layers=layers,
    )
    return Share(rank, size, config, part, heads, kv_heads, first)
