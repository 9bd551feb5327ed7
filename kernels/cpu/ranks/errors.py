"""What calls raise that other ranks would have to take part in."""


class RanksEnded(RuntimeError):
    """The ranks do not compute any more: one of them has ended."""
