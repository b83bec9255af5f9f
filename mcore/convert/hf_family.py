"""What a family of Hugging Face models has to say about itself."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from mcore.convert.model_options import ModelOptions
from mcore.convert.rules import Rule
from mcore.errors import UnsupportedError


class HfFamily(ABC):
    """Translates configuration and names of one `model_type`.

    Attributes:
        model_type: as in config.json.
        prefix: of all names but the output layer's; files may leave it out.
        buffers: names that old files hold and no model needs.
    """

    model_type: str
    prefix: str
    buffers: re.Pattern[str]

    @abstractmethod
    def options(self, config: Mapping[str, Any]) -> ModelOptions:
        """The options that compute what a configuration describes.

        Raises:
            UnsupportedError: it describes something that mcore does not compute.
            KeyError: an entry that has no default is absent.
        """

    @abstractmethod
    def misfits(self, options: ModelOptions) -> list[str]:
        """Options of a model that this family cannot express; empty = it fits."""

    @abstractmethod
    def config(self, options: ModelOptions) -> dict[str, Any]:
        """The configuration that describes a model."""

    @abstractmethod
    def rules(self, options: ModelOptions) -> Iterator[Rule]:
        """How each parameter is stored."""

    def full_name(self, name: str) -> str:
        """A name as `rules` spells it."""
        if name.startswith((self.prefix, "lm_head.")):
            return name
        return self.prefix + name

    @staticmethod
    def differences(options: ModelOptions, wanted: Mapping[str, Any]) -> list[str]:
        """Options that are not as wanted, in words."""
        return [
            f"{name} is {getattr(options, name)!r}, not {value!r}"
            for name, value in wanted.items()
            if getattr(options, name) != value
        ]


def require(config: Mapping[str, Any], name: str, value: Any) -> None:
    """Refuse a configuration by name unless an entry is absent or as given."""
    found = config.get(name, value)
    if found != value and found is not None:
        raise UnsupportedError(
            f"{name} is {found!r} in the Hugging Face configuration; models with {value!r} can be "
            "converted"
        )
