"""Megatron's text for which layers each pipeline stage holds: `Et*3|(tt|)*2ttL`.

`E` embedding, `t` one transformer layer, `L` loss, `|` end of a stage; `x*3` and `(...)*3` repeat;
commas and spaces mean nothing. Stages are listed in the order of the chain.
"""

from __future__ import annotations

import re

from mcore.errors import ConfigError

_REPEATED_LETTER = re.compile(r"([EtmL|])\*(\d+)")
_GROUP = re.compile(r"\(([^()]*)\)(?:\*(\d+))?")
# Far more than any model has layers; keeps a typing mistake from filling the memory.
_LONGEST = 100_000


def parse_layout(text: str) -> tuple[str, ...]:
    """The stages of a layout, repetitions written out.

    Args:
        text: as above.

    Returns:
        For each stage its letters, such as `("Ettt", "tt", "ttL")`.

    Raises:
        ConfigError: the text is no layout.
    """
    expanded = _expand_all(_REPEATED_LETTER, re.sub(r"[\s,]", "", text), text)
    while "(" in expanded and _GROUP.search(expanded):
        expanded = _expand_all(_GROUP, expanded, text)
    strange = sorted(set(expanded) - set("EtmL|"))
    if strange:
        raise ConfigError(
            f"--pipeline-model-parallel-layout {text!r} has {' '.join(strange)} where only E, t, "
            "L, |, (...)*N and x*N have a meaning"
        )
    if "m" in expanded:
        raise ConfigError(
            f"--pipeline-model-parallel-layout {text!r} has a multi-token-prediction layer (m), "
            "which mcore does not have; drop it"
        )
    return tuple(expanded.split("|"))


def layout_split(text: str, num_layers: int, pp: int) -> tuple[int, ...]:
    """How many layers each stage of a layout holds.

    Args:
        text: the layout.
        num_layers: layers of the whole model.
        pp: pipeline size.

    Raises:
        ConfigError: not exactly these layers, one E at the beginning and one L at the end, or a
            number of stages that pp does not divide.
    """
    stages = parse_layout(text)
    letters = "".join(stages)
    name = f"--pipeline-model-parallel-layout {text!r}"
    if len(stages) % pp:
        raise ConfigError(
            f"{name} has {len(stages)} stages, which must be a multiple of "
            f"--pipeline-model-parallel-size ({pp})"
        )
    if (letters[:1], letters[-1:], stages[0][:1], stages[-1][-1:]) != ("E", "L", "E", "L"):
        raise ConfigError(f"{name} must begin with E and end with L, in the first and last stage")
    if letters.count("E") + letters.count("L") != 2:
        raise ConfigError(f"{name} has E or L more than once")
    if letters.count("t") != num_layers:
        raise ConfigError(
            f"{name} has {letters.count('t')} layers (t), and --num-layers is {num_layers}"
        )
    return tuple(stage.count("t") for stage in stages)


def _expand_all(pattern: re.Pattern[str], current: str, text: str) -> str:
    def repeat(match: re.Match[str]) -> str:
        times = 1 if match[2] is None else int(match[2])
        if len(match[1]) * times > _LONGEST:
            raise ConfigError(
                f"--pipeline-model-parallel-layout {text!r} is longer than {_LONGEST} when "
                "written out"
            )
        return match[1] * times

    return pattern.sub(repeat, current)
