"""Records the launches of some work on a GPU, to replay them as one: CUDA graphs."""

import torch

from engine.recorded_runner import Work


class CudaGraphs:
    """See engine.recorded_runner.Recorder. All recordings share one pool of memory for what they make for
    themselves."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        self._warm_up(work)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()  # recorded, not done: the warm-up did it
        return graph.replay

    def _warm_up(self, work: Work) -> None:
        """Kernels are compiled, and libraries begun, before anything is recorded: neither can be. All on one stream:
        each keeps what memory it once had."""
        beside = self._beside
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            work()
        torch.cuda.current_stream().wait_stream(beside)
