"""docs/flags.md is what the configuration says now."""

from pathlib import Path

from mcore.training.arguments import build_parser
from tools.flags_page import flags_page

PAGE = Path(__file__).parents[3] / "docs" / "flags.md"


def test_the_page_is_current():
    assert PAGE.read_text() == flags_page(), "run `make docs`"


def test_the_page_has_every_flag():
    page = PAGE.read_text()
    flags = {flag for action in build_parser()._actions for flag in action.option_strings}
    assert {flag for flag in flags if f"`{flag}`" not in page} == {"-h", "--help"}
