"""Keys and values that a layer has seen, so that a new token does not compute them again."""

from __future__ import annotations

from torch import Tensor


class KeyValueCache:
    """The keys and values of one layer, of all tokens so far.

    Memory for the longest text is taken at the first use. Keys are stored as attention uses them,
    that is normalised and rotated.

    Args:
        max_length: tokens that it can hold.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._stored: tuple[Tensor, Tensor] | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens.

        Args:
            key: [s, b, g, d], of the new tokens.
            value: [s, b, g, d].

        Returns:
            Keys and values of all tokens so far, [length, b, g, d]: views of the cache.
        """
        end = self.length + key.shape[0]
        assert end <= self.max_length, f"{end} tokens in a cache for {self.max_length}"
        if self._stored is None:
            shape = (self.max_length, *key.shape[1:])
            self._stored = key.new_empty(shape), value.new_empty(shape)
        for stored, new in zip(self._stored, (key, value), strict=True):
            stored[self.length : end].copy_(new)
        self.length = end
        keys, values = self._stored
        return keys[:end], values[:end]
