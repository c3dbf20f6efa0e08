"""How many tokens one step may still compute."""


class TokenBudget:
    """Tokens of one step. A policy makes one for each plan and drops it with the plan."""

    __slots__ = ("_left",)

    def __init__(self, tokens: int) -> None:
        assert tokens >= 0, tokens
        self._left = tokens

    @property
    def left(self) -> int:
        """Tokens not yet granted."""
        return self._left

    def take(self, wanted: int) -> int:
        """Grant up to `wanted` tokens, in [0, wanted]: what is granted in all never exceeds the budget."""
        assert wanted >= 0, wanted
        granted = min(wanted, self._left)
        self._left -= granted
        return granted
