"""What a prompt is compared by: the set of its runs of eight words, as hashes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

WORDS, TOKENS = 8, 5  # in a run; prompts that are given as ids have no words

# Chinese and Japanese write no spaces: each of their characters counts as a word.
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+"
)


def text_shingles(text: str) -> NDArray[np.uint64]:
    """Hashes of all runs of eight words of `text`, ascending, each once; case and punctuation do not count.

    Of a shorter text the hash of all its words, of one without words that of the text. The same in every process.
    """
    words = _WORD.findall(text.lower()) or [text]
    return _runs([_hash(word) for word in words], WORDS)


def id_shingles(ids: Sequence[int]) -> NDArray[np.uint64]:
    """The same of all runs of five of at least one token id."""
    return _runs([_hash(str(token_id)) for token_id in ids], TOKENS)


def _runs(items: list[int], length: int) -> NDArray[np.uint64]:
    values = np.array(items, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(values, min(length, len(values)))
    # An odd factor for each place, so that order counts; the items are random 64 bits already. Sums wrap around.
    factors = np.array([_hash(f"place {place}") | 1 for place in range(windows.shape[1])], dtype=np.uint64)
    return np.unique((windows * factors).sum(axis=1, dtype=np.uint64))


@lru_cache(maxsize=1 << 18)
def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(errors="replace"), digest_size=8).digest(), "little")
