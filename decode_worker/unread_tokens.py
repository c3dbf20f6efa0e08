"""Tokens of answers that were computed, and of which nobody has read what they yield.

Called by the worker on the step thread, once per step. Books them when it is known what became of them.
"""

from decode_worker.prompts import Prompts
from engine.results import StepResult
from service.token_books import TokenBooks, Waste


class UnreadTokens:
    """tokens: how many there are."""

    def __init__(self, books: TokenBooks) -> None:
        self._books = books
        self.tokens = 0

    def book(self, result: StepResult, begun: int, prompts: Prompts) -> None:
        """begun: tokens of answers that the step computes. prompts: those that have no first token yet. What a step
        lands for nobody is of answers that have ended since, with their own last token or because nobody wants them."""
        self.tokens += begun
        if not result.landed:
            return
        landed = self.tokens - begun if result.unread else self.tokens
        told = [*result.outputs.sequences, *result.dead_ends]
        delivered = len(told) - prompts.among(told)
        self._books.deliver(delivered)
        self._books.waste(Waste.TOO_FAR, landed - delivered)
        self.tokens -= landed
