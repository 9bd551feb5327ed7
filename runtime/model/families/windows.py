"""Sliding windows that differ by layer, as the configs of several families describe them."""

from __future__ import annotations

from coppice.runtime.model.families.fields import Fields


def windows_by_layer(fields: Fields) -> tuple[int | None, ...]:
    """The window of each layer in tokens, None where the layer attends to all.

    ``use_sliding_window`` switches ``sliding_window`` on. ``layer_types`` names the kind of each
    layer; without it the layers from ``max_window_layers`` on have the window. Raises
    ``ValueError`` for kinds that contradict the rest.
    """
    count = fields.size("num_hidden_layers")
    switched_on = fields.switch("use_sliding_window")
    window = fields.optional_size("sliding_window") if switched_on else None
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.count("max_window_layers") if window is not None else count
        return tuple(window if index >= first else None for index in range(count))
    allowed = {"full_attention": None, "sliding_attention": window}
    known = isinstance(kinds, list) and all(str(kind) in allowed for kind in kinds)
    if not known or len(kinds) != count:
        raise ValueError(
            f"layer_types is {kinds}; it must have {count} entries (num_hidden_layers), each "
            f"one of {', '.join(allowed)}"
        )
    if window is None and "sliding_attention" in kinds:
        raise ValueError(
            "layer_types asks for sliding_attention, but sliding_window is not set "
            "(or use_sliding_window is false)"
        )
    return tuple(allowed[kind] for kind in kinds)
