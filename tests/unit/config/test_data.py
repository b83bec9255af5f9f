import pytest

from mcore.config.data import DataConfig
from mcore.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_path": ("p",), "data_args_path": "f"}, "--data-path and by --data-args-path"),
        ({"data_path": ("p",), "train_data_path": ("p",)}, "given twice"),
        ({"per_split_data_args_path": "f", "valid_data_path": ("p",)}, "given twice"),
        ({"train_data_path": ("p",), "split": "9,1"}, "its own corpus"),
        ({"per_split_data_args_path": "f", "split": "9,1"}, "its own corpus"),
        ({"num_workers": -1}, "num_workers. is -1"),
        ({"dataloader_type": "random"}, "use one of single, cyclic"),
    ],
)
def test_options_that_exclude_each_other(options, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**options)


def test_other_loaders_are_refused_by_name():
    assert DataConfig(dataloader_type="cyclic").dataloader_type == "cyclic"
    with pytest.raises(ConfigError, match="external"):
        DataConfig(dataloader_type="external")


def test_what_is_given():
    assert not DataConfig().has_data
    assert DataConfig(data_path=("p",)).has_data
    assert DataConfig(test_data_path=("p",)).has_data
    assert not DataConfig(data_path=("p",)).has_separate_splits
