"""A test that users run on their own machines before they trust them with a training run."""

from mcore.selftest.selftest import CheckedGroups, Compared, RoundTrip, SelfTest

__all__ = ["CheckedGroups", "Compared", "RoundTrip", "SelfTest"]
