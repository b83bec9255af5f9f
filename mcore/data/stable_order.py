"""`--data-order stable`: sample k is a function of (seed, epoch, number in the epoch) alone.

The documents of a split, shuffled once by the seed, are laid end to end in a circle of T tokens. An
epoch cuts the circle into T // seq_length samples, each with its last label behind it, beginning at
a token of the epoch's own, so that no two epochs cut alike and the up to seq_length - 1 tokens left
over are others each time. The samples of an epoch are dealt by a keyed permutation that is computed
for one number at a time. So nothing depends on how many samples are wanted: a longer run begins
with the samples of a shorter one.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np

from mcore.data.sample_order import Pieces, TokenStream

_ROUNDS = 4
_MASK = (1 << 64) - 1


class StableOrder:
    """An endless order of samples.

    Args:
        lengths: tokens of every document of the corpus, [corpus documents].
        documents: the split's document numbers, with at least seq_length + extra tokens in all.
        seq_length: tokens a sample advances by.
        seed: of the order.
        extra: 1 where a sample needs one more token for its last label, else 0.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        documents: np.ndarray,
        *,
        seq_length: int,
        seed: int,
        extra: int = 1,
    ) -> None:
        order = documents.astype(np.int32)
        # The legacy generator's stream is frozen for good; the newer ones may change.
        np.random.RandomState(seed).shuffle(order)
        self.stream = TokenStream(lengths, order)
        self._seq_length, self._seed, self._extra = seq_length, seed, extra
        self.samples_per_epoch = self.stream.num_tokens // seq_length
        assert self.stream.num_tokens >= seq_length + extra

    def place(self, index: int) -> tuple[int, int]:
        """(epoch, first token in the circle) of sample `index`."""
        epoch, number = divmod(index, self.samples_per_epoch)
        keys = _epoch_keys(self._seed, epoch)
        turned = permute(number, self.samples_per_epoch, keys) * self._seq_length
        return epoch, (keys[-1] + turned) % self.stream.num_tokens

    def pieces(self, index: int) -> Pieces:
        """The documents behind sample `index` and its last label."""
        _, start = self.place(index)
        count = self._seq_length + self._extra
        first = self.stream.pieces(start, count)
        missing = count - (self.stream.num_tokens - start)
        if missing <= 0:
            return first
        second = self.stream.pieces(0, missing)
        return Pieces(
            first.position,
            np.concatenate([first.documents, second.documents]),
            np.concatenate([first.offsets, second.offsets]),
            np.concatenate([first.lengths, second.lengths]),
        )


def permute(number: int, size: int, keys: tuple[int, ...]) -> int:
    """Where a keyed permutation of 0 .. size - 1 takes a number.

    A balanced Feistel network over the next even number of bits; what falls outside is sent through
    again until it falls inside, which takes fewer than four tries on average.

    Args:
        number: 0 <= number < size.
        size: of the permuted set.
        keys: one 64-bit key a round; further ones are not used.

    Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", sec. 3.
    """
    half = max(1, (size - 1).bit_length() + 1 >> 1)
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for key in keys[:_ROUNDS]:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        number = left << half | right
        if number < size:
            return number


def _mix(x: int) -> int:
    """The 64-bit finaliser of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


@functools.lru_cache(maxsize=64)
def _epoch_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Keys of the rounds, and the token where the epoch's first cut is (before the modulus)."""
    return tuple(
        int.from_bytes(
            hashlib.blake2b(f"{seed} {epoch} {part}".encode(), digest_size=8).digest(), "little"
        )
        for part in range(_ROUNDS + 1)
    )
