"""The `mcore` command: one sub-command a module of this folder."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from mcore.config.command_line import StrictParser, did_you_mean
from mcore.errors import ConfigError, McoreError, TopologyError, UnsupportedError
from mcore.version import __version__

#: Each is the module `mcore.cli.NAME`, loaded when it is asked for: some take seconds to import.
COMMANDS = ("check", "ckpt", "convert", "data", "generate", "ranks", "schedule", "selftest")

#: Exit status after Ctrl-C: 128 + SIGINT, as of a shell's own commands.
INTERRUPTED = 130

_USAGE_ERRORS = (ConfigError, TopologyError, UnsupportedError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 0 done, 1 files or data are at fault, 2 usage, 130 Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _build_parser(words).parse_args(words)
        return int(args.run(args))
    except _USAGE_ERRORS as error:
        return _fail(error, 2)
    except (McoreError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return INTERRUPTED


def _build_parser(words: Sequence[str]) -> StrictParser:
    """The parser with the sub-commands that these words can reach: the named one, or all."""
    parser = StrictParser(
        prog="mcore",
        description="Tools around training with mcore. `mcore COMMAND --help` explains one.",
    )
    parser.add_argument("--version", action="version", version=f"mcore {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    first = next(iter(words), "")
    if first and not first.startswith("-") and first not in COMMANDS:
        raise ConfigError(
            f"unknown command {first!r}{did_you_mean(first, COMMANDS)} "
            f"(commands: {', '.join(COMMANDS)})"
        )
    for name in (first,) if first in COMMANDS else COMMANDS:
        importlib.import_module(f"mcore.cli.{name}").register(subparsers)
    return parser


def _fail(error: Exception, status: int) -> int:
    if isinstance(error, BrokenPipeError):  # the reader of our output, such as `head`, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status
    print(f"mcore: error: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
