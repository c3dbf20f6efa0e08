"""Guides as something that knows which tokens may follow: compiled by llguidance, over the bytes of a model's tokens.

Workers make a matcher of each guided order, off their step threads; the gateway's checker tries whether a guide can be
followed at all. Loads the vocabulary when it is told to or first asked. A matcher is a fold over the tokens of an
answer: what it allows is a function of the guide and of these tokens. Knows no request and no sampling. What it says
of a guide it refuses is safe to pass on.
"""

import importlib.util
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from service.guide_grammars import grammar
from service.guide_mistakes import mistake
from service.guides import Guide, GuideKind, GuideRefused
from service.model_source import ModelFilesError

if TYPE_CHECKING:
    import llguidance

    from service.pieces import Pieces
    from service.vocabulary import Vocabulary

TokenMask: TypeAlias = NDArray[np.uint32]

NOT_INSTALLED = "needs llguidance, which is not installed here: pip install 'crossdock[guided]'"
COMPILED_MAX = 64
PATIENCE_S = 0.1
PATIENCE_PER_TOKEN_S = 0.003
"""What masks of one answer may take of the step thread, in processor time: at once, and from then on for each token. A
usual one takes a tenth of a millisecond."""
OPTIONAL_PROPERTIES_MAX = 500
"""Of an object, where nothing else is ambiguous: four items each. More of them would use up the patience."""
TRIAL_WALKS = 8
TRIAL_TOKENS = 16
"""So often and so far a guide is followed when it is tried: what explodes behind its first tokens is found out at the
door."""


def installed() -> bool:
    """Whether guides can be compiled here."""
    return importlib.util.find_spec("llguidance") is not None


class GuideCompiler:
    """vocabulary: reads the model's, once. vocab_size: of the model's logits, at least that of the vocabulary; None for
    the vocabulary's own. clock: seconds of its thread's work. compiled_max: guides that are kept for whoever asks for
    them again. Any thread; one compiles at a time."""

    def __init__(
        self,
        vocabulary: "Callable[[], Vocabulary]",
        vocab_size: int | None = None,
        clock: Callable[[], float] = time.thread_time,
        compiled_max: int = COMPILED_MAX,
    ) -> None:
        self._clock = clock
        self._compiled_max = compiled_max
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokens: llguidance.LLTokenizer | None = None
        self._ends: frozenset[int] = frozenset()
        self._compiled: OrderedDict[Guide, GuideMatcher] = OrderedDict()

    def load(self) -> None:
        """Read the vocabulary, unless that is done. Raises GuideRefused when no guide can be followed here."""
        with self._lock:
            self._load()

    def matcher(self, guide: Guide, tokens: Iterable[int] = ()) -> "GuideMatcher":
        """Where an answer that begins with these tokens stands. Raises GuideRefused for a guide that cannot be
        compiled, matches nothing, or is not that of such an answer."""
        with self._lock:
            self._load()
            compiled = self._compiled.get(guide)
            if compiled is None:
                compiled = self._compiled[guide] = self._compile(guide)
                if len(self._compiled) > self._compiled_max:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(guide)
            matcher = compiled.fork()
        for token in tokens:
            matcher.advance(token)
        if not matcher.allowed().any():
            raise GuideRefused(matcher.error() or "nothing can follow")
        return matcher

    def _compile(self, guide: Guide) -> "GuideMatcher":
        import llguidance

        assert self._tokens is not None
        limits = _limits(guide.kind)
        try:
            matcher = llguidance.LLMatcher(self._tokens, grammar(guide), log_level=0, limits=limits)
        except (GuideRefused, MemoryError):
            raise
        except Exception as error:  # llguidance raises what it likes for texts that are none of the kind
            raise GuideRefused(mistake(str(error), guide)) from None
        if matcher.is_error():
            raise GuideRefused(mistake(matcher.get_error(), guide))
        known = self._tokens.vocab_size
        compiled = GuideMatcher(
            matcher, vocab_size=self._vocab_size or known, known=known, ends=self._ends, clock=self._clock
        )
        if not compiled.allowed().any():
            raise GuideRefused(compiled.error() or "matches nothing")
        return compiled

    def _load(self) -> None:
        if self._tokens is not None:
            return
        if not installed():
            raise GuideRefused(NOT_INSTALLED)
        import llguidance

        from service.pieces import Pieces

        try:
            vocabulary = self._vocabulary()
            pieces = Pieces(vocabulary)
        except ModelFilesError:
            raise GuideRefused("the model's files do not say what its tokens are") from None
        if not vocabulary.eos_token_ids:
            raise GuideRefused("the model has no end-of-sequence token")
        if self._vocab_size is not None and self._vocab_size < vocabulary.size:
            raise GuideRefused("the model has fewer tokens than its vocabulary")
        self._ends = frozenset(vocabulary.eos_token_ids)
        tokens = _TokenBytes(vocabulary, pieces)
        self._tokens = llguidance.LLTokenizer(
            tokens,  # type: ignore[arg-type]  # what it asks for is documented in its TokenizerWrapper
            n_vocab=vocabulary.size,
            eos_token=list(vocabulary.eos_token_ids),
        )


class GuideMatcher:
    """See engine.constraint.Constraint. A mistake of the compiler's, or work beyond its limits, shows as nothing
    allowed. vocab_size: of the logits; known: tokens that have bytes, all others are never allowed. clock: see
    `GuideCompiler`."""

    def __init__(
        self,
        matcher: "llguidance.LLMatcher",
        *,
        vocab_size: int,
        known: int,
        ends: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self.ends = ends
        self._clock = clock
        self._left_s = PATIENCE_S
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._known = known
        self._mask: TokenMask | None = None

    def allowed(self) -> TokenMask:
        if self._mask is None:
            started = self._clock()
            self._mask = self._next_mask()
            self._left_s -= self._clock() - started
        return self._mask

    def advance(self, token: int) -> None:
        started = self._clock()
        self._mask = None
        if not self._matcher.is_error():
            self._matcher.consume_token(token)
        left_s = self._left_s - (self._clock() - started)
        self._left_s = min(left_s + PATIENCE_PER_TOKEN_S, PATIENCE_S) if left_s >= 0 else left_s

    def fork(self) -> "GuideMatcher":
        forked = GuideMatcher(
            self._matcher.deep_copy(),
            vocab_size=self._vocab_size,
            known=self._known,
            ends=self.ends,
            clock=self._clock,
        )
        forked._mask, forked._left_s = self._mask, self._left_s
        return forked

    def error(self) -> str:
        """What went wrong, in one line; empty when nothing did."""
        if self._left_s < 0:
            return "takes too long to tell what may follow"
        return mistake(self._matcher.get_error()) if self._matcher.is_error() else ""

    def _next_mask(self) -> TokenMask:
        mask = np.zeros((self._vocab_size + 31) // 32, np.uint32)
        if self._left_s >= 0 and not self._matcher.is_error():
            words = (self._known + 31) // 32
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, words * mask.itemsize)
            if self._matcher.is_error():
                mask[:] = 0
            else:
                self._keep_ends_for_the_end(mask)
        return mask

    def _keep_ends_for_the_end(self, mask: TokenMask) -> None:
        """A grammar may name an end-of-sequence token anywhere; an answer ends with it, so that it may follow only
        where the answer is complete, or is so with it."""
        for token in self.ends:
            bit = np.uint32(1 << token % 32)
            if mask[token // 32] & bit and not self._complete_with(token):
                mask[token // 32] &= ~bit

    def _complete_with(self, end: int) -> bool:
        if self._matcher.is_accepting():
            return True
        ended = self._matcher.deep_copy()
        return bool(ended.consume_token(end)) and bool(ended.is_accepting())

    def try_out(self) -> None:
        """Follow it for a few tokens, several times, by ways that depend on nothing else. Raises GuideRefused where it
        breaks."""
        for walk in range(TRIAL_WALKS):
            self.fork()._follow(walk)

    def _follow(self, walk: int) -> None:
        ends = sorted(self.ends)
        for step in range(TRIAL_TOKENS):
            may = np.flatnonzero(np.unpackbits(self.allowed().view(np.uint8), bitorder="little"))
            if not len(may):
                raise GuideRefused(self.error() or "nothing can follow")
            going_on = np.setdiff1d(may, ends, assume_unique=True)
            if not len(going_on):
                return
            self.advance(int(going_on[len(going_on) * (walk * (2 * step + 1) % TRIAL_WALKS) // TRIAL_WALKS]))


class _TokenBytes:
    """What llguidance asks of a tokenizer. Special tokens stand for no text here, and no text for them; the vocabulary
    is changed to that end."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: "Vocabulary", pieces: "Pieces") -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.tokens = [pieces[token] for token in range(vocabulary.size)]
        self.special_token_ids = sorted(pieces.special.union(vocabulary.eos_token_ids))
        self._backend = vocabulary.backend
        self._backend.encode_special_tokens = True

    def __call__(self, text: str | bytes) -> list[int]:
        given = text if isinstance(text, str) else text.decode(errors="replace")
        return list(self._backend.encode(given, add_special_tokens=False).ids)


def _limits(kind: GuideKind) -> "llguidance.LLParserLimits":
    """Of work and memory, in llguidance's units: the worst step takes some ten milliseconds, all states tens of MiB. An
    object of many optional properties takes many items in few of its steps, an ambiguous grammar in each."""
    import llguidance

    of_json = kind in (GuideKind.JSON_SCHEMA, GuideKind.JSON_OBJECT)
    return llguidance.LLParserLimits(
        initial_lexer_fuel=100_000,
        step_lexer_fuel=20_000,
        step_max_items=50_000 if of_json else 5_000,
        max_items_in_row=4 * OPTIONAL_PROPERTIES_MAX if of_json else 2_000,
        max_lexer_states=10_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )
