"""How a prompt is shown in OpenAI's answers: as text and tokens before those of the answer, and in vLLM's form.

`openai_answers` calls it. Pure translation.
"""

import codecs
from collections.abc import Sequence

from crossdock.v1 import inference_pb2
from gateway.openai_dialects import JsonDict, finite, token_text
from gateway.openai_offsets import Offsets, offsets_in, shown_pieces
from gateway.request import Request, Token
from gateway.tokenizer import Tokenizer
from service.scores import Score, Scores


def echoed_text(spec: inference_pb2.GenerationSpec, request: Request, tokenizer: Tokenizer) -> str:
    """As it was given, where all of a text was taken. A character that the answer completes is the answer's."""
    if _is_whole_text(spec):
        return spec.text
    joined = b"".join(_pieces(spec, request, tokenizer))
    return codecs.getincrementaldecoder("utf-8")("replace").decode(joined, final=request.prompt_only)


def echoed_offsets(spec: inference_pb2.GenerationSpec, request: Request, tokenizer: Tokenizer) -> list[int]:
    """Where each token begins in the echo, in characters."""
    if _is_whole_text(spec):
        return offsets_in(spec.text, request.prompt_token_ids, tokenizer)
    return Offsets().of(_pieces(spec, request, tokenizer))


def _is_whole_text(spec: inference_pb2.GenerationSpec) -> bool:
    return spec.WhichOneof("prompt") == "text" and not spec.HasField("truncate_prompt_tokens")


def _pieces(spec: inference_pb2.GenerationSpec, request: Request, tokenizer: Tokenizer) -> list[bytes]:
    """What each token adds to an echo that is made of tokens."""
    pieces = shown_pieces(request.prompt_token_ids, request, tokenizer)
    first = next((place for place, piece in enumerate(pieces) if piece), None)
    if first is not None and tokenizer.drops_first_space and _begins(spec, pieces):
        pieces[first] = pieces[first].removeprefix(b" ")
    return pieces


def _begins(spec: inference_pb2.GenerationSpec, pieces: Sequence[bytes]) -> bool:
    """Whether nothing was cut off in front of what is left of a prompt."""
    if spec.WhichOneof("prompt") == "token_ids":
        return len(spec.token_ids.ids) == len(pieces)
    return b"".join(pieces).removeprefix(b" ") == spec.text.encode()


def echoed_tokens(request: Request, scores: Scores | None) -> tuple[Token, ...]:
    """With as many alternatives as the answer's tokens have. Nothing comes before the first one, which has no
    logprob."""
    first, *others = request.prompt_token_ids
    wide = request.sampling.logprobs
    if scores is None or wide is None:
        return ()
    told = (
        Token(
            position=place,
            token_id=token,
            logprob=scores[place - 1].logprob,
            top=scores[place - 1].top[:wide],
        )
        for place, token in enumerate(others, start=1)
    )
    return (Token(position=0, token_id=first, logprob=None, top=()), *told)


def prompt_logprobs(
    request: Request, scores: Scores, alternatives: int, tokenizer: Tokenizer
) -> list[JsonDict | None]:
    """Of each token: by id, what is said of it and of so many alternatives; null for the first."""
    others = request.prompt_token_ids[1:]
    return [None, *(_entry(token, scores[at], alternatives, tokenizer) for at, token in enumerate(others))]


def _entry(token_id: int, score: Score, alternatives: int, tokenizer: Tokenizer) -> JsonDict:
    """The token itself comes first."""
    ranked = [(token_id, score.logprob, score.rank)]
    ranked += [
        (other, logprob, rank)
        for rank, (other, logprob) in enumerate(score.top[:alternatives], start=1)
        if other != token_id
    ]
    return {
        str(one): {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(one, tokenizer)}
        for one, logprob, rank in ranked
    }
