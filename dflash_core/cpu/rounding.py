"""Shapes in which bf16 on the CPU gives the same bits, whatever else a step holds.

A token must not depend on whether drafts are verified with it, on the sequences beside it, or on
the bucket of the attention length. Products and attention are done by library kernels that sum up
in an order of their own choice; most shapes agree bit for bit, and the few that do not are avoided
here. The figures were found by trial (PyTorch 2.13, oneDNN and MKL, an AVX512-BF16 processor); a
library that chooses otherwise costs the equality of rare near-ties, nothing else. In float32 the
difference is some 1e-6 of a logit, so nothing is padded there.
"""

from __future__ import annotations

import torch

# One row is summed up in another order than 2 or more (1536 inputs: 1 result in 4000 differs).
MIN_PRODUCT_ROWS = 2

# Query rows of a key/value head: 1 to 3 differ from 4 and more (seen up to 768).
MIN_ATTENTION_ROWS = 8

# Attention works on blocks of 512 keys. A last block of 128, 384 or 512 gives the same bits, one
# of 256 to 320 others, and so does one that is not a multiple of 16.
KEY_BLOCK = 512
LAST_KEY_BLOCKS = (0, 128, 384, 512)


def rounding_differs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether shapes have to be chosen with care."""
    return device.type == "cpu" and dtype != torch.float32


def attention_length(needed: int) -> int:
    """The smallest safe number of keys that is at least `needed`."""
    blocks, rest = divmod(needed, KEY_BLOCK)
    return blocks * KEY_BLOCK + next(size for size in LAST_KEY_BLOCKS if size >= rest)
