"""What `pretrain_gpt.py` trains, out of a configuration: the model of a stage, and the data."""

from __future__ import annotations

import functools

from mcore.config.run import RunConfig
from mcore.data.builder import Datasets, build_train_valid_test_datasets
from mcore.data.corpus_meta import TokenizerIdentity
from mcore.data.sft_builder import build_sft_datasets
from mcore.models.gpt import GPTModel
from mcore.tokenizers import build_tokenizer, encode_segments, fingerprint, start_ids
from mcore.training.setup import Stage


def model_provider(config: RunConfig, stage: Stage) -> GPTModel:
    """The part of the model that a pipeline stage holds."""
    assert config.tokenizer.vocab_size is not None
    assert config.max_positions is not None
    return GPTModel(
        config.model,
        vocab_size=config.tokenizer.vocab_size,
        max_sequence_length=config.max_positions,
        pre_process=stage.pre_process,
        post_process=stage.post_process,
        share_embeddings_and_output_weights=not config.gpt.untie_embeddings_and_output_weights,
        position_embedding_type=config.gpt.position_embedding_type,
        rotary_percent=config.gpt.rotary_percent,
        rotary_base=config.gpt.rotary_base,
        rotary_scaling=config.gpt.rotary_scaling,
        make_vocab_size_divisible_by=config.tokenizer.make_vocab_size_divisible_by,
        layer_range=stage.layers,
        vp_stage=stage.vp_stage,
        seed=config.training.seed,
    )


def datasets_provider(
    config: RunConfig, sizes: tuple[int | None, int | None, int | None]
) -> Datasets:
    """Training, validation and test data."""
    tokenizer = build_tokenizer(config.tokenizer)
    assert config.training.seq_length is not None
    if config.data.sft:
        return build_sft_datasets(
            config.data,
            sizes=sizes,
            seq_length=config.training.seq_length,
            seed=config.training.seed,
            encode=functools.partial(encode_segments, tokenizer),
            eod_id=tokenizer.eod,
            start_ids=start_ids(tokenizer),
            budget=config.training.max_tokens_per_microbatch,
        )
    return build_train_valid_test_datasets(
        config.data,
        sizes=sizes,
        seq_length=config.training.seq_length,
        seed=config.training.seed,
        eod_id=tokenizer.eod,
        pad_id=tokenizer.pad,
        vocab_size=tokenizer.vocab_size,
        tokenizer=TokenizerIdentity(
            str(config.tokenizer.tokenizer_type),
            tokenizer.vocab_size,
            tokenizer.eod,
            functools.cache(lambda: fingerprint(tokenizer)),
        ),
    )
