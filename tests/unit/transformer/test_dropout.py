import itertools
from dataclasses import replace

import pytest
import torch

from mcore.config.transformer import TransformerConfig
from mcore.errors import ConfigError
from mcore.transformer.dropout import DropoutState, Site, attention_dropout, dropout
from mcore.transformer.layer import TransformerLayer

STATE = DropoutState(seed=1234, iteration=7, sample_index=torch.tensor([40, 41]))
SHAPE = (64, 2, 96)


def mask(state=STATE, probability=0.5, layer=3, site=Site.MLP_OUTPUT, first=0, shape=SHAPE):
    ones = torch.ones(shape, dtype=torch.float64)
    return dropout(ones, probability, state, layer=layer, site=site, first_position=first) > 0


def agreement(first, second):
    """Part of the elements that two masks share; 1/2 for independent masks at probability 1/2."""
    return float((first == second).double().mean())


def is_independent(first, second):
    # Five standard deviations of 12,288 fair coins are 0.0226.
    return abs(agreement(first, second) - 0.5) < 0.0226


@pytest.mark.parametrize("probability", [0.05, 0.1, 0.5, 0.9])
def test_rate_and_scale(probability):
    x = torch.full((256, 4, 128), 3.0, dtype=torch.float64)
    state = replace(STATE, sample_index=torch.arange(4))
    out = dropout(x, probability, state, layer=0, site=Site.EMBEDDING)
    kept = out != 0
    deviation = (probability * (1 - probability) / x.numel()) ** 0.5
    assert abs(float((~kept).double().mean()) - probability) < 5 * deviation
    torch.testing.assert_close(out[kept], x[kept] / (1 - probability), rtol=1e-15, atol=0)


def test_every_line_of_the_mask_has_the_rate():
    kept = mask(probability=0.1, shape=(256, 2, 256)).double()
    for dim in (0, 2):
        rates = kept.mean(dim=[d for d in range(3) if d != dim])
        assert (rates - 0.9).abs().max() < 5 * (0.09 / (kept.numel() / 256)) ** 0.5


def test_a_part_of_the_sequence_has_its_part_of_the_mask():
    """And the halves of a sequence-parallel pair are no copies of each other."""
    whole = mask()
    halves = [mask(first=first, shape=(32, 2, 96)) for first in (0, 32)]
    assert torch.equal(torch.cat(halves), whole)
    assert is_independent(*halves)


def test_a_sample_has_its_mask_wherever_it_is_computed():
    one = replace(STATE, sample_index=torch.tensor([41]))
    assert torch.equal(mask(one, shape=(64, 1, 96))[:, 0], mask()[:, 1])


def test_masks_of_different_things_are_independent():
    masks = [
        mask(),
        mask(replace(STATE, seed=1235)),
        mask(replace(STATE, iteration=8)),
        mask(replace(STATE, sample_index=torch.tensor([42, 43]))),
        mask(layer=4),
        mask(site=Site.ATTENTION_OUTPUT),
        mask(site=Site.EMBEDDING),
    ]
    for first, second in itertools.combinations(masks, 2):
        assert is_independent(first, second)
    # Consecutive samples, layers and iterations must not be shifted copies either.
    for other in masks[1:]:
        for shift in (1, 2, 96):
            flat, shifted = masks[0].flatten()[shift:], other.flatten()[:-shift]
            assert is_independent(flat, shifted)


def test_attention_masks_go_by_global_head():
    weights = torch.ones(2, 4, 48, 48, dtype=torch.float64)
    whole = attention_dropout(weights, 0.5, STATE, layer=2, first_head=0)
    parts = [
        attention_dropout(weights[:, :2], 0.5, STATE, layer=2, first_head=head) for head in (0, 2)
    ]
    assert torch.equal(torch.cat(parts, 1), whole)
    for first, second in itertools.combinations(range(4), 2):
        assert is_independent(whole[:, first] > 0, whole[:, second] > 0)


def test_the_gradient_has_the_mask_of_the_output():
    x = torch.randn(16, 2, 8, dtype=torch.float64, requires_grad=True)
    out = dropout(x, 0.3, STATE, layer=0, site=Site.MLP_OUTPUT)
    out.sum().backward()
    assert torch.equal(x.grad == 0, out == 0)
    torch.testing.assert_close(x.grad[out != 0].unique(), torch.tensor([1 / 0.7]).double())


def test_no_random_state_is_used():
    before = torch.get_rng_state()
    mask()
    assert torch.equal(torch.get_rng_state(), before)


def test_probability_zero_is_the_identity():
    x = torch.randn(4, 2, 8)
    assert dropout(x, 0.0, STATE, layer=0, site=Site.EMBEDDING) is x


@pytest.mark.parametrize("site", ["hidden_dropout", "attention_dropout"])
def test_a_layer_without_a_state_says_what_it_needs(site):
    rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0, site: 0.1}
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **rates)
    with pytest.raises(ConfigError, match="needs a DropoutState"):
        TransformerLayer(config)(torch.zeros(3, 1, 8))
