"""How slowly a client may read what is said to it. Of whoever is slower, what it asked for is stopped."""

STALL_S = 120.0
"""For a message; where bytes are counted, for so many of them."""
STALL_BYTES = 1 << 20
"""Or whatever is left, if that is less: some nine kilobytes a second."""
