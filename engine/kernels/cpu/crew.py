"""A built library and the threads that run its kernels.

Owns the threads, which end with it: whoever has native calls to make holds on to it. One caller at a time.
"""

import weakref

from engine.kernels.core_share import ANY_CORES, CoreShare
from engine.kernels.cpu.library import Library


class Crew:
    """Raises CapacityError when the system refuses the threads. handle: of the thread pool, for the library."""

    def __init__(self, library: Library, threads: int, cores: CoreShare = ANY_CORES) -> None:
        self.library = library
        self.handle = library.start_thread_pool(threads, cores)
        weakref.finalize(self, library.stop_thread_pool, self.handle)
