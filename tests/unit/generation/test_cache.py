"""The key-value cache: every family, texts of different lengths, and models spread over ranks."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from mcore.convert import hf_to_state, save_model_state
from mcore.generation import Sampling, generate_batch, load_model
from mcore.generation.decoder import Decoder
from mcore.parallel_state import destroy_model_parallel, initialize_model_parallel
from mcore.testing import run_distributed
from mcore.topology.context import ParallelContext
from tests.unit.convert import test_families

FAMILIES = ("gpt2", "llama-3", "mistral", "qwen3")
PROMPTS = [[5, 17, 90, 17, 3, 44], [8], [61, 2, 33, 80, 80, 12, 7, 7, 51, 20, 19, 4, 4]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Random models: family -> (transformers' model, our checkpoint)."""
    models = {}
    for name in FAMILIES:
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(11)
        theirs = AutoModelForCausalLM.from_config(test_families.FAMILIES[name]).eval()
        for key, parameter in theirs.named_parameters():
            is_norm = ("norm" in key or "ln_" in key) and key.endswith("weight")
            torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.2)
        theirs.save_pretrained(folder / "hf")
        options, tensors = hf_to_state(folder / "hf")
        save_model_state(folder / "mcore", options, tensors, {})
        models[name] = (theirs, folder / "mcore")
    return models


def tokens(model, prompts, **options):
    steps = list(generate_batch(model, prompts, **options))
    return [[t for t in row if t is not None] for row in zip(*steps, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_that_of_transformers(models, family):
    theirs, root = models[family]
    theirs.generation_config.eos_token_id = None
    expected = []
    for prompt in PROMPTS:
        whole = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        expected.append(whole[0, len(prompt) :].tolist())
    model = load_model(root).model
    greedy = Sampling(greedy=True)
    assert tokens(model, PROMPTS, max_new_tokens=24, sampling=greedy) == expected
    alone = tokens(model, PROMPTS[:1], max_new_tokens=24, sampling=greedy, use_cache=False)
    assert alone == expected[:1]
    assert len({token for row in expected for token in row}) > 5  # no model that repeats itself


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_logits_are_those_of_the_whole_text(models, family):
    model = load_model(models[family][1]).model
    ctx = ParallelContext.single()
    cached, plain = (
        Decoder(model, PROMPTS, max_length=33, ctx=ctx, use_cache=use) for use in (True, False)
    )
    alone = [Decoder(model, [prompt], max_length=40, ctx=ctx) for prompt in PROMPTS]
    for step in range(20):
        logits = cached.next_logits()
        torch.testing.assert_close(logits, plain.next_logits(), atol=1e-5, rtol=0)
        single = torch.cat([decoder.next_logits() for decoder in alone])
        torch.testing.assert_close(logits, single, atol=1e-5, rtol=0)
        assert logits.std() > 0.1
        new = [(7 * step) % 97, 3, step]
        for decoder in (cached, plain):
            decoder.append(new)
        for decoder, token in zip(alone, new, strict=True):
            decoder.append([token])


def test_a_sample_depends_on_its_own_prompt_and_seed(models):
    model = load_model(models["llama-3"][1]).model
    options = {"max_new_tokens": 12, "sampling": Sampling(temperature=0.9, top_k=30, top_p=0.95)}
    together = tokens(model, PROMPTS, seeds=[1, 2, 3], **options)
    alone = [
        tokens(model, [p], seeds=[s], **options)[0] for p, s in zip(PROMPTS, (1, 2, 3), strict=True)
    ]
    assert together == alone
    assert together != tokens(model, PROMPTS, seeds=[4, 5, 6], **options)
    stop = together[1][4]
    cut = tokens(model, PROMPTS, seeds=[1, 2, 3], stop_id=stop, **options)
    assert cut == [row[: row.index(stop)] if stop in row else row for row in together]


def spread(roots, layouts):
    """Texts of every checkpoint at every layout: (greedy, sampled)."""
    texts = []
    for tp, pp in layouts:
        ctx = initialize_model_parallel(tp, pp)
        for root in roots:
            model = load_model(root, ctx=ctx).model
            for sampling in (Sampling(greedy=True), Sampling(temperature=0.8, top_p=0.9)):
                texts.append(tokens(model, PROMPTS, max_new_tokens=8, sampling=sampling, ctx=ctx))
        destroy_model_parallel()
    return texts


@pytest.mark.dist
def test_every_layout_gives_the_same_texts(models):
    roots = [models[name][1] for name in ("gpt2", "qwen3")]
    layouts = [(2, 2), (4, 1), (1, 2)]  # tp 4 shares query groups; (1, 2) has replicas
    expected = []
    for root in roots:
        model = load_model(root).model
        for sampling in (Sampling(greedy=True), Sampling(temperature=0.8, top_p=0.9)):
            expected.append(tokens(model, PROMPTS, max_new_tokens=8, sampling=sampling))
    for texts in run_distributed(spread, 4, roots, layouts, timeout=400):
        assert texts == expected * len(layouts)
