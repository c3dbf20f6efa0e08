"""Python's collector of cyclic garbage in a process that serves. Called once, when a process is ready.

What start-up made stays: it is frozen, so that no later collection walks through modules, classes and tables.
The collector stays on. Without it, cycles (exceptions with their tracebacks, tasks, calls of gRPC) would gather for as
long as there is work, and to collect when idle is no bound: a busy pool is never idle. But its first threshold, 700
objects, is less than one step of a few hundred sequences has alive at once, all of which go by reference counting: a
collection in each step would find nothing. With YOUNG_OBJECTS_MAX only what really gathers starts one, of less than a
millisecond.
"""

import gc

YOUNG_OBJECTS_MAX = 10_000
MIDDLE_COLLECTIONS = 10


def freeze_garbage() -> None:
    """Collect, and never look at what is left again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, MIDDLE_COLLECTIONS, MIDDLE_COLLECTIONS)
