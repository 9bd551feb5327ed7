"""Which adapters an engine has, by name: they are loaded, used by requests, and unloaded.

Each adapter has an identity made of its name and of what its files contain. The tree keeps the KV
of an adapter that acts on all tokens in a namespace of that identity. One that is invoked by tokens
shares the base model's namespace; there a *mark*, a number made of the identity, stands for the
token at which it begins (see `AdapterUse`). So another adapter under an old name hits nothing of
the old one, and the same files under the same name are the same adapter in every process.

An adapter that is unloaded while requests use it *retires*: they run to their ends with it, no new
one gets it, and with the last of them its matrices and its pages are given back.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from coppice.runtime.model.adapters.loaded import LoadedAdapters
from coppice.runtime.model.adapters.matrices import read_adapter
from coppice.runtime.model.config import ModelConfig
from coppice.runtime.model.files.path import resolve_model
from coppice.runtime.requests.lora_request import LoRARequest
from coppice.runtime.requests.request import AdapterUse

# Marks are from here on, below 2**31: no vocabulary has so many tokens.
_FIRST_MARK = 1 << 30


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that is loaded.

    Attributes:
        asked: its name, its caller's number and its path.
        number: in its engine; never used again.
        identity: the name and a digest of its files.
        invocation: the tokens that invoke it; None: it acts on all.
        mark: what the tree calls the token at which it begins; None without `invocation`.
    """

    asked: LoRARequest
    number: int
    identity: str
    invocation: tuple[int, ...] | None
    mark: int | None

    def use(self, prompt: Sequence[int]) -> AdapterUse | None:
        """How a request with this prompt uses it; None: not at all, since nothing invokes it."""
        if self.invocation is None:
            return AdapterUse(self.number)
        begin = _last_place(prompt, self.invocation)
        return None if begin is None else AdapterUse(self.number, begin, self.mark)


class Adapters:
    """The adapters of one engine.

    Args:
        model: that they change.
        loaded: takes their matrices; None: the engine takes no adapters (`enable_lora`).
        max_rank, max_adapters: the greatest rank, and the most adapters at a time, the retiring
            ones included.
        freed: called with each adapter that is given back, to remove its pages.

    Attributes:
        marks: of those with an invocation, a digest by what the tree calls the token there.
    """

    def __init__(
        self,
        model: ModelConfig,
        loaded: LoadedAdapters | None,
        *,
        max_rank: int,
        max_adapters: int,
        freed: Callable[[Adapter], None],
    ) -> None:
        self._model, self._loaded = model, loaded
        self._max_rank, self._max_adapters = max_rank, max_adapters
        self._freed = freed
        self._named: dict[str, Adapter] = {}
        self._retiring: dict[str, Adapter] = {}  # by identity
        self._next = 0
        self.marks: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._named)

    @property
    def retiring(self) -> bool:
        """Whether some are unloaded as soon as no request uses them."""
        return bool(self._retiring)

    def listed(self) -> list[LoRARequest]:
        """Those that requests may use."""
        return [each.asked for each in self._named.values()]

    def all(self) -> list[tuple[Adapter, bool]]:
        """All that have matrices; whether a request may use each, or it is unloaded already."""
        named = [(each, True) for each in self._named.values()]
        return named + [(each, False) for each in self._retiring.values()]

    def find(self, asked: LoRARequest) -> Adapter:
        """The adapter that a request asks for; it is loaded if it is not yet.

        Raises ValueError as `load` does, and if its name or its number is that of another one.
        """
        known = self._named.get(asked.lora_name)
        if known is None:
            return self.load(asked)
        if known.asked != asked:
            raise ValueError(
                f"lora_request: adapter {asked.lora_name!r} is loaded from "
                f"{known.asked.lora_path!r} with lora_int_id {known.asked.lora_int_id}, got "
                f"{asked.lora_path!r} and {asked.lora_int_id}; unload it first"
            )
        return known

    def load(self, asked: LoRARequest, *, replace: bool = False) -> Adapter:
        """Reads an adapter from its folder.

        With `replace` one of that name is unloaded then. Raises ValueError, with nothing changed,
        if it can't be read or does not fit the model, and for a name or a number that is taken, or
        too many adapters.
        """
        if self._loaded is None:
            raise ValueError(
                f"lora_request: adapters are off, give enable_lora; got {asked.lora_name!r}"
            )
        old = self._named.get(asked.lora_name)
        if old is not None and not replace:
            raise ValueError(f"lora_name: an adapter named {asked.lora_name!r} is loaded already")
        for other in self._named.values():
            if other is not old and other.asked.lora_int_id == asked.lora_int_id:
                raise ValueError(
                    f"lora_int_id must differ from that of other adapters, got "
                    f"{asked.lora_int_id}, which {other.asked.lora_name!r} has"
                )
        try:
            folder = resolve_model(asked.lora_path)
        except ValueError as error:
            raise ValueError(f"lora_path: {str(error).replace('model is', 'it is', 1)}") from error
        files = read_adapter(folder, self._model, self._max_rank)
        identity = f"{asked.lora_name}@{files.digest[:16]}"
        if old is not None and old.identity == identity:
            same = Adapter(asked, old.number, identity, old.invocation, old.mark)
            self._named[asked.lora_name] = same  # requests ask for it as it is asked for now
            return same
        back = self._retiring.pop(identity, None)
        if back is None:
            self._check_room(asked, old)
            number = self._next
            self._next += 1
            mark = self._mark(files.digest) if files.invocation is not None else None
            back = Adapter(asked, number, identity, files.invocation, mark)
            if mark is not None:
                self.marks[mark] = files.digest.encode()
            self._loaded.put(number, files.pieces)
        else:
            back = Adapter(asked, back.number, identity, back.invocation, back.mark)
        if old is not None:
            self._retire(old)
        self._named[asked.lora_name] = back
        return back

    def unload(self, name: str) -> None:
        """Gives an adapter to no new request, and frees it once none uses it (`free`).

        Raises ValueError if there is none of that name.
        """
        adapter = self._named.pop(name, None)
        if adapter is None:
            known = ", ".join(map(repr, self._named)) or "none"
            raise ValueError(f"lora_name: no adapter is named {name!r}; there is {known}")
        self._retire(adapter)

    def free(self, used: Container[int]) -> None:
        """Gives back the matrices and pages of retiring adapters whose number is not in `used`."""
        for identity, adapter in list(self._retiring.items()):
            if adapter.number not in used:
                del self._retiring[identity]
                assert self._loaded is not None
                self._loaded.drop(adapter.number)
                self._freed(adapter)
                if adapter.mark is not None:
                    del self.marks[adapter.mark]

    def _retire(self, adapter: Adapter) -> None:
        self._retiring[adapter.identity] = adapter

    def _check_room(self, asked: LoRARequest, old: Adapter | None) -> None:
        held = len(self._named) + len(self._retiring)
        if held - (old is not None) >= self._max_adapters:
            more = f", {len(self._retiring)} of them until their requests end"
            raise ValueError(
                f"lora_name: {asked.lora_name!r} is one adapter too many: max_loras is "
                f"{self._max_adapters}, and {held} are loaded{more if self._retiring else ''}"
            )

    def _mark(self, digest: str) -> int:
        """A mark that no other adapter has."""
        taken = {each.mark for each in (*self._named.values(), *self._retiring.values())}
        mark = int(digest, 16) % _FIRST_MARK
        while mark + _FIRST_MARK in taken:
            mark = (mark + 1) % _FIRST_MARK
        return mark + _FIRST_MARK


def _last_place(tokens: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Where `wanted` begins in `tokens` for the last time; None if it is not there. O(tokens)."""
    text = (tokens if isinstance(tokens, array) else array("i", tokens)).tobytes()
    pattern = array("i", wanted).tobytes()
    size = array("i").itemsize
    at = text.rfind(pattern)
    while at >= 0 and at % size:
        at = text.rfind(pattern, 0, at + len(pattern) - 1)
    return None if at < 0 else at // size
