"""Triton's kernels run in its interpreter here: it decides when it is first imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
