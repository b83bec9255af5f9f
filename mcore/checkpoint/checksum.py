"""CRC-32 of the zlib polynomial: by the processor's carry-less multiplication where it can.

zlib's own computes it at the speed of a fast disk, which would make a checksum the slowest part of
reading; ISA-L's is an order of magnitude faster and gives the same number.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this platform
    from zlib import crc32

__all__ = ["crc32"]
