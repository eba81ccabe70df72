"""Vocabulary padding. Torch-free."""

import math

_ALIGN = 64  # rows of the head: a multiple of 64 keeps bf16 matrix multiplies aligned, and is the same for tp 1, 2, 4, ..., 64


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Smallest multiple of 64 and of `tp` that holds `vocab_size` entries.

    >>> padded_vocab_size(257, 2), padded_vocab_size(1000, 3)
    (320, 1152)
    """
    multiple = math.lcm(_ALIGN, tp)
    return -(-vocab_size // multiple) * multiple
