"""Sampling where the logits are: on the device, without bringing them to the host.

A row that wants what only the host does (other logits than the model's, alternatives or candidates) goes to the host,
and no other. Called by the core like the sampler that it is; how tokens are drawn on the device is an argument.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from engine.distribution import BROKEN, SamplingKernels
from engine.errors import NonFiniteLogits
from engine.sampling import NO_RULES, Drawing, Rule, Sampled, Sampler, unbroken
from engine.sequence import SamplingParams


class DrawnToken(NamedTuple):
    """token: BROKEN where the row has none. logprob: under the model's own distribution, None unless asked for."""

    token: int
    logprob: float | None


class DeviceDrawing(Protocol):
    """Tokens that the device is drawing. tokens: int64 [n], there; 0 for a row that has none."""

    @property
    def tokens(self) -> torch.Tensor: ...

    def read(self) -> list[DrawnToken]:
        """Wait until they are drawn, and for nothing that was begun later."""
        ...


class DeviceDraw(Protocol):
    """A token for each of some places of the logits, float32 [any, vocab], there already; waits for nothing."""

    def __call__(
        self,
        logits: torch.Tensor,
        places: Sequence[int],
        params: Sequence[SamplingParams],
        positions: Sequence[int],
    ) -> DeviceDrawing: ...


class _Begun(NamedTuple):
    """See engine.sampling.Drawing."""

    draws: DeviceDrawing
    settled: bool = False

    @property
    def tokens(self) -> torch.Tensor:
        return self.draws.tokens

    def read(self, wanted: Sequence[int]) -> list[Sampled]:
        return unbroken([Sampled(*each, ()) for each in self.draws.read()], wanted)


class DeviceSampler(Sampler):
    """See Sampler, whose tokens and logprobs these are, to the bit. kernels: what draws on the host. settle: waits as
    `Sampler.settle` does, asleep: a device that hangs must not pass for a thread that computes."""

    def __init__(
        self, kernels: SamplingKernels, draw: DeviceDraw, settle: Callable[[torch.Tensor], None]
    ) -> None:
        super().__init__(kernels)
        self._draw_there = draw
        self._settle = settle

    def settle(self, logits: torch.Tensor) -> None:
        self._settle(logits)

    def sample(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        rules: Mapping[int, Rule] = NO_RULES,
    ) -> list[Sampled]:
        assert len(params) == len(positions) == len(logits), f"{len(params)} rows, logits {logits.shape}"
        there = [at for at, one in enumerate(params) if at not in rules and _plain(one)]
        if not there:
            return super().sample(logits, params, positions, rules)
        draws = self._draw_there(logits, there, [params[at] for at in there], [positions[at] for at in there])
        found = {at: Sampled(*each, ()) for at, each in zip(there, draws.read(), strict=True)}
        bad = [at for at, sampled in found.items() if sampled.token == BROKEN]
        here = [at for at in range(len(params)) if at not in found]
        if here:
            rules_here = {turn: rules[at] for turn, at in enumerate(here) if at in rules}
            own = ([params[at] for at in here], [positions[at] for at in here], rules_here)
            try:
                found |= zip(here, super().sample(logits[here], *own), strict=True)
            except NonFiniteLogits as error:
                bad += [here[turn] for turn in error.rows]
        if bad:
            raise NonFiniteLogits(tuple(sorted(bad)))
        return [found[at] for at in range(len(params))]

    def begin(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> Drawing:
        assert all(_plain(one) for one in params), params
        return _Begun(self._draw_there(logits, range(len(params)), params, positions))


def _plain(params: SamplingParams) -> bool:
    """Whether nothing is asked for but a token and its logprob."""
    return not (params.logprobs or params.candidates)
