"""Who is given up when blocks are short. A pure function over views; what becomes of a victim, others know."""

from collections.abc import Iterable

from engine.policy import SequenceView


def victims(generating: Iterable[SequenceView], missing_blocks: int) -> list[SequenceView]:
    """Those that cost least to resume, until what they free and no longer need makes up for the missing blocks.

    Never the one that arrived first and never a steadfast one, so that somebody always gets on; of two that cost the
    same the later one goes. When all that may go do not suffice, all of them go: then nobody but the first still lacks
    a block, and who else holds any was promised the rest.
    """
    in_order = sorted(generating, key=lambda one: (one.arrived, one.id))
    candidates = [one for one in in_order[1:] if not one.steadfast]
    candidates.sort(key=lambda one: (one.cost_to_resume, -one.arrived, one.id))
    chosen: list[SequenceView] = []
    for one in candidates:
        if missing_blocks <= 0:
            break
        chosen.append(one)
        missing_blocks -= one.blocks_freed + one.blocks_to_continue
    return chosen
