"""Command-line tools that compose the library."""
