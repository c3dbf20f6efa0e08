"""How long a client may take nothing of what is said to it. What it asked for is then stopped."""

STALL_S = 120.0
