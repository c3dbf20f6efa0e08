"""How a prompt is shown in OpenAI's answers: as text and tokens before those of the answer, and in vLLM's form.

`openai_answers` calls it. Pure translation.
"""

import codecs

from crossdock.v1 import inference_pb2
from gateway.openai_dialects import JsonDict, finite, token_text
from gateway.request import Request, Token
from gateway.tokenizer import Tokenizer
from service.scores import Score, Scores


def echoed_text(spec: inference_pb2.GenerationSpec, request: Request, tokenizer: Tokenizer) -> str:
    """As it was given, where all of a text was taken. A character that the answer completes is the answer's."""
    if spec.WhichOneof("prompt") == "text" and not spec.HasField("truncate_prompt_tokens"):
        return spec.text
    special = request.include_special_tokens
    pieces = (tokenizer.piece(token, include_special=special) for token in request.prompt_token_ids)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(
        b"".join(pieces), final=request.prompt_only
    )


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
