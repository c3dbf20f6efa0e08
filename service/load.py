"""How busy a worker is, as it is told to gateways and to metrics. A frozen picture, replaced after each step."""

from typing import NamedTuple


class WorkerLoad(NamedTuple):
    """waiting_tokens: prompt tokens not yet computed, over all sequences. finished_sequences: since start.
    borrowed_core_ms: what cores of other workers have computed for this one, since start. step_ms,
    prompt_token_ms, hand_off_token_ms: of a step that generates, of a token of a prompt, of handing one over after the
    prompt is done; as measured lately, 0 while unknown."""

    step: int = 0
    running_sequences: int = 0
    waiting_sequences: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    finished_sequences: int = 0
    borrowed_core_ms: int = 0
    step_ms: float = 0.0
    prompt_token_ms: float = 0.0
    hand_off_token_ms: float = 0.0

    def queue(self) -> tuple[int, int, int]:
        """What is there to be done."""
        return self.running_sequences, self.waiting_sequences, self.waiting_tokens
