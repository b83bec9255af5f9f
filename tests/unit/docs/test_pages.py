"""What the pages show is what the commands print, and their links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from mcore.cli.main import main

ROOT = Path(__file__).parents[3]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
SHOWN = [
    (page.name, command, output)
    for page in PAGES
    for command, output in re.findall(
        r"```console\n\$ (mcore .*)\n((?:.*\n)*?)```", page.read_text()
    )
]


@pytest.mark.parametrize(("page", "command", "output"), SHOWN)
def test_output_of_commands(capsys, page, command, output):
    assert main(shlex.split(command)[1:]) == 0
    printed = "".join(line.rstrip() + "\n" for line in capsys.readouterr().out.splitlines())
    assert printed == "".join(line.rstrip() + "\n" for line in output.splitlines()), page


def test_there_are_commands_to_compare():
    assert len(SHOWN) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
