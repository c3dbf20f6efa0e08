"""Records the launches of some work on a GPU, to replay them as one: CUDA graphs."""

from collections.abc import Callable

import torch


class CudaGraphs:
    """See engine.recorded_runner.Recorder. All recordings share one pool of memory: the result of a replay is valid
    until the next replay of any of them."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self._warm_up(work)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        replay()  # recording launches nothing
        return replay

    def _warm_up(self, work: Callable[[], torch.Tensor]) -> None:
        """Kernels are compiled, and libraries begun, before anything is recorded: neither can be."""
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            work()
        torch.cuda.current_stream().wait_stream(beside)
