"""What runs of an order once its prompt is there: a sequence for each choice, or a search. Before that, what computes a
prompt that nobody sends.

Called by the worker on the step thread. Says what an order may ask of this worker and what may arrive for it; keeps
nothing.
"""

from decode_worker.beam_search import BeamSearch
from decode_worker.reservations import Reservation
from decode_worker.search import Search
from engine.cache.block_pool import Credit
from engine.cache.block_table import BlockTable
from engine.constraint import Constraint, ends_of
from engine.core import EngineCore
from engine.sequence import PREEMPTIONS_MAX, SamplingParams, Sequence, StopRules
from kvtransfer.events import FirstTokens
from service.orders import AttemptRefused, Beam, Choice, SequenceOrder


def require_possible(
    order: SequenceOrder, *, handed_over: bool, seats: int, total_blocks: int, block_size: int
) -> None:
    """Raises AttemptRefused for what would wait here for ever, or has nothing to do here. handed_over: its prompt is
    computed elsewhere."""
    if handed_over and not order.goes_on():
        raise AttemptRefused("max_tokens: an answer that ends with its first token is not for this worker")
    if order.branches() > seats:
        raise AttemptRefused(f"choices: {order.branches()} sequences at once; there are {seats} seats")
    if order.blocks(block_size) > total_blocks:
        raise AttemptRefused(f"choices: {order.blocks(block_size)} blocks in all; there are {total_blocks}")


def believable(first_tokens: FirstTokens, order: SequenceOrder, vocab_size: int) -> bool:
    """Whether these can be the first tokens of an order's choices that go on. A search finds its own."""
    if order.beam is not None:
        return not first_tokens
    indices = [choice for choice, _ in first_tokens]
    asked = {each.index for each in order.choices}
    known = len(set(indices)) == len(indices) and asked.issuperset(indices)
    return known and bool(indices) and all(token < vocab_size for _, token in first_tokens)


def prompt_sequence(reservation: Reservation, computed: int) -> Sequence:
    """What computes the prompt and draws the first token of each choice. computed: tokens that were cached. What
    several go on from is never given up: all of it was promised."""
    order, (first, *others) = reservation.order, reservation.order.choices
    alone = not others and order.branches() == 1
    preemptions = order.preemptions if alone else PREEMPTIONS_MAX
    sequence = _sequence(reservation, first, order.token_ids, computed, preemptions)
    sequence.cached, sequence.scored = computed, order.prompt_logprobs
    sequence.twins = tuple(order.sampling(choice, SamplingParams) for choice in others)
    return sequence


def run_choices(
    core: EngineCore,
    reservation: Reservation,
    first_tokens: FirstTokens,
    table: BlockTable,
    credit: Credit,
    *,
    block_size: int,
) -> dict[int, Sequence]:
    """A running sequence for each of these choices. Several share the blocks of the prompt; each of them is promised
    all that it can ever write."""
    pool, order = core.pool, reservation.order
    known, asked = len(order.token_ids), {each.index: each for each in order.choices}
    if order.branches() == 1:
        ((choice, first_token),) = first_tokens
        tokens = (*order.token_ids, first_token)
        alone = _sequence(reservation, asked[choice], tokens, known, order.preemptions)
        alone.table, alone.credit = table, credit
        core.adopt(alone)
        return {choice: alone}
    pool.waive(credit)
    common = order.common_tokens() // block_size
    sequences = {}
    for choice, first_token in first_tokens:
        tokens = (*order.token_ids, first_token)
        sequence = _sequence(reservation, asked[choice], tokens, known, PREEMPTIONS_MAX)
        sequence.table = pool.fork(table, table.owner)
        sequence.credit = pool.grant(table.owner, order.branch_blocks(block_size) - common)
        sequences[choice] = sequence
    pool.release(table)
    for sequence in sequences.values():
        core.adopt(sequence)
    return sequences


def begin_search(
    core: EngineCore, reservation: Reservation, beam: Beam, table: BlockTable, credit: Credit
) -> Search:
    """A search over the blocks of the prompt, which takes its first step with the engine's next one."""
    order = reservation.order
    scores = BeamSearch(beam, order.stop_rules(StopRules, ends_of(None)), len(order.token_ids))
    search = Search(core=core, gateway=reservation.gateway, order=order, scores=scores, credit=credit)
    search.begin(table, reservation.chain, reservation.arrived)
    return search


def _sequence(
    reservation: Reservation, choice: Choice, tokens: tuple[int, ...], computed: int, preemptions: int
) -> Sequence:
    """One of the order's choices, so far."""
    order, constraint = reservation.order, _constraint(reservation, tokens)
    return Sequence(
        id=(order.key.request_id, order.key.attempt, choice.index),
        tokens=list(tokens),
        sampling=order.sampling(choice, SamplingParams),
        prompt_tokens=order.prompt_tokens,
        stop=order.stop_rules(StopRules, ends_of(constraint)),
        constraint=constraint,
        arrived=reservation.arrived,
        preemptions=preemptions,
        chain=reservation.chain.fork(),
        computed=computed,
    )


def _constraint(reservation: Reservation, tokens: tuple[int, ...]) -> Constraint | None:
    """At the end of these, which begin with the order's."""
    if reservation.constraint is None:
        return None
    constraint = reservation.constraint.fork()
    for token in tokens[len(reservation.order.token_ids) :]:
        constraint.advance(token)
    return constraint
