"""What a caller of OpenAI's paths calls the fields of a message, so that a refusal names what the caller wrote.

The schema notes the names while it reads a body; errors are told with them. Pure; it looks at no value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

_GROUPS = ("sampling.", "output.")

_USUAL = {
    "text": "prompt",
    "token_ids.ids": "prompt",
    "token_ids": "tokens",
    "chat": "messages",
    "chat.messages": "messages",
    "stop.strings": "stop",
    "stop.token_ids": "stop_token_ids",
    "sampling.beam_width": "best_of",
}


@dataclass(frozen=True, slots=True)
class FieldNames:
    """written: names that depend on the body, by field; what is said of a whole answer's form goes by "guide"."""

    written: Mapping[str, str] = field(default_factory=dict)

    def of(self, field: str) -> str:
        """field: of a message, or already the caller's own."""
        path, bracket, place = field.partition("[")
        if path == "guide" or path.startswith("guide."):
            return self.written.get("guide", field)
        if field in self.written:
            return self.written[field]
        plain = path
        for group in _GROUPS:
            plain = plain.removeprefix(group)
        return self.written.get(path, _USUAL.get(path, plain)) + bracket + place


USUAL_NAMES = FieldNames()
