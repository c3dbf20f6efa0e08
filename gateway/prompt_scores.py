"""How likely a request's prompt is, as far as workers have told: each position once, whoever computes it how often.

One for all journals of a request. Talks to nobody.
"""

from gateway.request import Request
from service.reports import PromptReport
from service.scores import Scores


class PromptScores:
    def __init__(self, request: Request) -> None:
        self._width = request.prompt_logprobs
        self._wanted = 0 if self._width is None else len(request.prompt_token_ids) - 1
        self._known = 0
        self._parts: list[Scores] = []
        self._all: Scores | None = None

    def due(self) -> bool:
        """Whether some of what is wanted is not known yet."""
        return self._known < self._wanted

    def take(self, report: PromptReport) -> bool:
        """Enter what is new in it. False for what cannot be, and then nothing is entered."""
        first, count = report.first_position, len(report.scores)
        possible = 1 <= first <= self._known + 1 and first + count <= self._wanted + 1
        if not possible or report.scores.width != self._width:
            return False
        new = report.scores.since(self._known + 1 - first)
        if len(new):
            self._parts.append(new)
            self._known += len(new)
        return True

    def all(self) -> Scores | None:
        """Of every token but the first; None where nobody asked. To be asked for when nothing is due."""
        if self._width is None:
            return None
        assert not self.due(), f"{self._known} of {self._wanted}"
        if self._all is None:
            self._all, self._parts = Scores.joined(self._parts), []
        return self._all
