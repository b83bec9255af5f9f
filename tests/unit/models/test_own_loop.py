"""What a program that builds GPTModel by itself meets: names, dropout, a model that learns."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from examples.custom_model import ShiftModel
from mcore import parallel_state
from mcore.models.gpt import GPTModel
from mcore.testing import run_distributed
from mcore.training import Stage
from mcore.transformer import TransformerConfig
from mcore.transformer.dropout import DropoutState

H, D, HEADS, GROUPS, F = 16, 6, 4, 2, 24  # width, channels of a head, heads, query groups, FFN


def names_and_shapes(tied):
    """State dict of this rank: name -> shape."""
    parallel_state.initialize_model_parallel(2, 2)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=H,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=D,
        ffn_hidden_size=F,
        gated_linear_unit=True,
        add_bias_linear=False,
        qk_layernorm=True,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
    )
    model = GPTModel(
        config,
        vocab_size=250,
        max_sequence_length=8,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied,
        make_vocab_size_divisible_by=128,
    )
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def wanted_names(stage):
    """As Megatron-Core's local spec has them, on each of two tensor-parallel ranks."""
    shapes = {}
    for i in range(2):  # numbered within the stage
        for name, shape in {
            "input_layernorm.weight": (H,),
            "input_layernorm.bias": (H,),
            "self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * D // 2, H),
            "self_attention.q_layernorm.weight": (D,),
            "self_attention.q_layernorm.bias": (D,),
            "self_attention.k_layernorm.weight": (D,),
            "self_attention.k_layernorm.bias": (D,),
            "self_attention.linear_proj.weight": (H, HEADS * D // 2),
            "pre_mlp_layernorm.weight": (H,),
            "pre_mlp_layernorm.bias": (H,),
            "mlp.linear_fc1.weight": (2 * F // 2, H),
            "mlp.linear_fc2.weight": (H, F // 2),
        }.items():
            shapes[f"decoder.layers.{i}.{name}"] = shape
    if stage == 0:
        shapes["embedding.word_embeddings.weight"] = (128, H)  # 250, padded to 2 x 128
        shapes["embedding.position_embeddings.weight"] = (8, H)
    else:
        shapes |= {f"decoder.final_layernorm.{name}": (H,) for name in ("weight", "bias")}
        shapes["output_layer.weight"] = (128, H)
    return shapes


@pytest.mark.dist
@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_of_a_cut_model(tied):
    for rank, found in enumerate(run_distributed(names_and_shapes, 4, tied)):
        assert found == wanted_names(rank // 2)


def small_model(**options):
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, **options)
    return GPTModel(config, vocab_size=37, max_sequence_length=12)


def two_outputs(tp, dropout_state):
    """Logits of two calls with the same tokens, gathered over tensor-parallel ranks."""
    parallel_state.initialize_model_parallel(tp)
    torch.manual_seed(3)
    model = small_model(
        hidden_dropout=0.3, attention_dropout=0.3, tensor_model_parallel_size=tp
    ).train()
    model.parallel_output = False
    tokens = torch.arange(24).view(2, 12)
    return [model(tokens, dropout_state=dropout_state).detach() for _ in range(2)]


@pytest.mark.dist
def test_masks_of_data_parallel_ranks_differ_unless_the_program_says_what_they_depend_on():
    (alone, alone_again), (other, other_again) = run_distributed(two_outputs, 2, 1, None)
    for a, b in ((alone, other), (alone, alone_again), (other, other_again)):
        assert not torch.isclose(a, b).all(dim=-1).any()  # at no token
    (cut, cut_again), (peer, peer_again) = run_distributed(two_outputs, 2, 2, None)
    torch.testing.assert_close([cut, cut_again], [alone, alone_again], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close([peer, peer_again], [cut, cut_again])
    given = DropoutState(1, 1, torch.arange(2))
    same = [x for rank in run_distributed(two_outputs, 2, 1, given) for x in rank]
    assert all(torch.equal(x, same[0]) for x in same)


def test_one_batch_is_learnt_by_heart():
    torch.manual_seed(1)
    model = small_model(hidden_dropout=0.0, attention_dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens = torch.randint(37, (4, 13), generator=torch.Generator().manual_seed(2))
    losses = []
    for _ in range(60):
        loss = model(tokens[:, :-1], labels=tokens[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(37.0).log().item(), abs=0.2)
    assert losses[-1] < 0.05


def later_stage(kind):
    """A last stage of GPTModel or of the example, which takes its input from the stage before."""
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    if kind == "gpt":
        return GPTModel(config, vocab_size=37, max_sequence_length=12, pre_process=False)
    run = SimpleNamespace(
        model=config,
        training=SimpleNamespace(seed=1),
        tokenizer=SimpleNamespace(vocab_size=37),
    )
    return ShiftModel(run, Stage(False, True, range(1), None))


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("kind", ["gpt", "example"])
def test_a_stage_keeps_its_input_no_longer_than_its_graph(kind, trains):
    model = later_stage(kind).train(trains)
    tokens = torch.arange(24).view(2, 12)
    received = torch.randn(12, 2, 32, requires_grad=trains)
    alive = weakref.ref(received)
    model.set_input_tensor([received])
    with torch.set_grad_enabled(trains):
        loss = model(tokens, labels=tokens).mean()
    if trains:
        assert alive() is not None
        loss.backward()
        assert received.grad is not None
    del received, loss
    assert alive() is None


@pytest.mark.parametrize("samples", [1, 2])
def test_the_loss_is_no_view(samples):
    """`fully_shard` has hooks on what a model returns, and warns of a view at every step."""
    config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=HEADS)
    model = GPTModel(config, vocab_size=20, max_sequence_length=8)
    ids = torch.arange(8).expand(samples, 8)
    loss = model(ids, labels=ids)
    assert loss.shape == (samples, 8)
    assert loss._base is None
