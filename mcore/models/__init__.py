"""Models built of mcore's layers."""
