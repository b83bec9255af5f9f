"""A line of text that a process shows the others on its machine, also once it is dead.

It lies in memory that they share: to write it is to copy a few bytes, without a system call. Like
`mcore.signals` this module loads no torch.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref

_BYTES = 128


class Notice:
    """A line, empty at first.

    Args:
        memory: where it lies.
        address: where other processes open it while this one lives; empty where they cannot.
    """

    def __init__(self, memory: mmap.mmap | bytearray, address: str = "") -> None:
        self._memory = memory
        self.address = address

    def write(self, text: str) -> None:
        """Replace it; of a long text the first 128 bytes are shown."""
        self._memory[:] = text.encode()[:_BYTES].ljust(_BYTES, b"\0")

    def read(self) -> str:
        """The text."""
        return bytes(self._memory).rstrip(b"\0").decode(errors="replace")


def own_notice() -> Notice:
    """A line of this process, which others can open where the kernel is Linux."""
    if sys.platform == "linux":
        try:
            descriptor = os.memfd_create("mcore-notice")
            os.ftruncate(descriptor, _BYTES)
            memory = mmap.mmap(descriptor, _BYTES)
        except OSError:  # not allowed here
            return Notice(bytearray(_BYTES))
        notice = Notice(memory, f"/proc/{os.getpid()}/fd/{descriptor}")
        # The others open it by its number, as long as this process has the notice.
        weakref.finalize(notice, os.close, descriptor).atexit = False
        return notice
    return Notice(bytearray(_BYTES))


def open_notice(address: str) -> Notice:
    """Another process's line, to be read also once that process is dead; empty if out of sight."""
    try:
        descriptor = os.open(address, os.O_RDONLY)
    except OSError:
        return Notice(bytearray(_BYTES))
    try:
        return Notice(mmap.mmap(descriptor, _BYTES, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)
