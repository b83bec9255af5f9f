"""Documents in one sample do not see each other, at any layout."""

from functools import partial

import pytest
import torch

from mcore import parallel_state
from mcore.config.transformer import TransformerConfig
from mcore.models.gpt import GPTModel
from mcore.pipeline_parallel.schedules import get_forward_backward_func
from mcore.testing import run_distributed
from mcore.transformer import pack_documents
from tests.equivalence.program import SINGLE, Layout, layout_id, train
from tests.equivalence.tiny import SEQUENCE, command, write_corpus

FLAGS = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
LAYOUTS = [Layout(tp=2, sp=True), Layout(pp=4), Layout(tp=2, pp=2, sp=True)]
FIRST = 7  # tokens of the first document of the probe


def token_losses(layout, keeps_to_documents, first_token):
    """Loss of every token of one sample of two documents, of which the first begins otherwise."""
    parallel_state.initialize_model_parallel(layout.tp, layout.pp)
    try:
        ctx = parallel_state.get_parallel_context()
        config = TransformerConfig(
            num_layers=4,
            hidden_size=32,
            num_attention_heads=4,
            sequence_parallel=layout.sp,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            init_method_std=0.3,
        )
        model = GPTModel(
            config,
            vocab_size=101,
            max_sequence_length=SEQUENCE,
            pre_process=ctx.pp.is_first,
            post_process=ctx.pp.is_last,
            position_embedding_type="rope",
            seed=1,
        )
        tokens = torch.arange(1, SEQUENCE + 2)[None]
        tokens[0, 0] = first_token
        is_start = torch.zeros(1, SEQUENCE, dtype=torch.bool)
        is_start[0, FIRST] = True
        mask = pack_documents(is_start) if keeps_to_documents else None
        losses: list[torch.Tensor] = []

        def loss_func(output):
            losses.append(output.detach().clone())
            return output.sum(), torch.tensor(1.0)

        def forward_step(_, chunk):
            output = chunk(tokens[:, :-1], None, mask, labels=tokens[:, 1:])
            return output, loss_func

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=model,
            num_microbatches=1,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=True,
        )
        return losses[0][0].tolist() if losses else None
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.dist
@pytest.mark.parametrize("layout", [Layout(tp=2), *LAYOUTS], ids=layout_id)
def test_a_token_does_not_depend_on_an_earlier_document(layout):
    losses = partial(run_distributed, token_losses, layout.world_size, layout)
    first, second = losses(True, 50), losses(True, 60)
    assert first[-1][FIRST:] == second[-1][FIRST:]
    assert first[-1][1 : FIRST - 1] != second[-1][1 : FIRST - 1]
    assert losses(False, 50)[-1][FIRST:] != losses(False, 60)[-1][FIRST:]


@pytest.mark.dist
@pytest.mark.parametrize(
    "positions", [pytest.param("learned_absolute", marks=pytest.mark.full), "rope"]
)
def test_training_is_that_of_one_process(tmp_path, positions):
    corpus = write_corpus(tmp_path / "corpus")
    flags = command(corpus, 3, FLAGS, f"--position-embedding-type {positions}", micro=2)
    reference = train(flags, SINGLE)
    plain = train(command(corpus, 3, f"--position-embedding-type {positions}", micro=2), SINGLE)
    assert abs(plain[0]["lm_loss"] - reference[0]["lm_loss"]) > 1e-4
    for layout in LAYOUTS:
        for got, want in zip(train(flags, layout), reference, strict=True):
            assert abs(got["lm_loss"] - want["lm_loss"]) < 3e-6, layout
            assert abs(got["grad_norm"] - want["grad_norm"]) < 1e-5 * want["grad_norm"], layout
