"""The predicted bytes of a rank against what its allocator counted.

Bytes between steps are in `tests/unit/distributed/test_state_bytes.py`.
"""

import gc
from dataclasses import asdict, replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mcore.config.tokenizer import TokenizerConfig
from mcore.errors import ConfigError
from mcore.optimizer import gradients
from mcore.training.activation_memory import LayerActivations, block_activations
from mcore.training.arguments import build_config, parse
from mcore.training.gpt import datasets_provider, model_provider
from mcore.training.held_memory import HeldMemory, held_memory
from mcore.training.memory import predict_memory
from mcore.training.memory_table import MeasuredMemory, measured_table, memory_table
from pretrain_gpt import forward_step
from tests.equivalence.program import SINGLE, Layout, Providers, layout_id, train_and_inspect
from tests.equivalence.tiny import command

_running: list[profile] = []


STEPS = 4


def watched_forward_step(data_iterator, model):
    """Watch the allocator in each step from the second on: then all that stays is there."""
    if len(_running) < data_iterator.iteration - 1:
        if _running:
            _running[-1].stop()
        gc.collect()  # what earlier tests left would be freed meanwhile
        _running.append(profile(activities=[ProfilerActivity.CPU], profile_memory=True))
        _running[-1].start()
    return forward_step(data_iterator, model)


def allocations(events):
    for event in events:
        if event.name == "[memory]":
            yield event
        yield from allocations(event.children)


def peak_of_the_step(state):
    """Pipeline rank, bytes beyond what is held between steps, parameters of this rank.

    Steps need the same; what was not seen to be freed only adds, so the least one counts.
    """
    _running[-1].stop()
    peaks = [peak_of(profiler) for profiler in _running]
    assert len(peaks) == STEPS - 1
    _running.clear()
    pieces = [p.numel() for chunk in state.chunks for p in chunk.parameters()]
    return state.chunks[0].context.pp.rank, min(peaks), sum(pieces)


def peak_of(profiler):
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    held = peak = 0
    given = {}
    for event in sorted(allocations(tree), key=lambda e: e.start_time_ns):
        place, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        # What gloo's threads free is not told, but for the place being given out again.
        held += size - (given.pop(place, 0) if size > 0 else 0)
        given.pop(place, None)
        if size > 0:
            given[place] = size
        peak = max(peak, held)
    return peak


PROVIDERS = Providers(datasets_provider, model_provider, watched_forward_step)

SHAPE = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 "
    "--global-batch-size 8 --hidden-dropout 0 --attention-dropout 0"
)
FULL = "--recompute-granularity full --recompute-method"
LLAMA = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights"
)
FP16 = "--fp16 --initial-loss-scale 1024"
SMALL_BUCKETS = "--ddp-bucket-size 20000"  # of 200,000 parameters
HYBRID = "--num-distributed-optimizer-instances 2"
DAILY = [
    ("", SINGLE),
    (f"{FULL} uniform --recompute-num-layers 1", SINGLE),
    ("--bf16 --vocab-size 5000 --cross-entropy-loss-fusion", SINGLE),
    ("--bf16 --zero-stage 2", Layout(dp=2)),
    ("--zero-stage 3", Layout(pp=2, dp=2)),
]
OTHERS = [
    (LLAMA, SINGLE),
    (f"{LLAMA} --group-query-attention --num-query-groups 2 --qk-layernorm", SINGLE),
    ("--hidden-dropout 0.1 --attention-dropout 0.1", SINGLE),
    (f"{FULL} uniform --recompute-num-layers 2", SINGLE),
    (f"{FULL} block --recompute-num-layers 2", SINGLE),
    ("--recompute-activations", SINGLE),
    ("--recompute-activations --recompute-modules mlp", SINGLE),
    ("--recompute-activations --recompute-modules layernorm", SINGLE),
    ("--recompute-activations --recompute-modules core_attn layernorm mlp", SINGLE),
    ("--bf16", SINGLE),
    ("--bf16 --fp32-residual-connection", SINGLE),
    ("--vocab-size 5000", SINGLE),
    ("--vocab-size 5000 --cross-entropy-loss-fusion", SINGLE),
    ("", Layout(tp=2)),
    ("", Layout(tp=2, sp=True)),
    ("", Layout(pp=2)),
    ("", Layout(pp=2, vpp=2)),
    ("--zero-stage 1", Layout(dp=2)),
    ("--zero-stage 2", Layout(dp=2)),
    ("--zero-stage 3", Layout(dp=2)),
    ("--bf16 --zero-stage 3", Layout(dp=2)),
    (f"{FULL} uniform --recompute-num-layers 1 --distribute-saved-activations", Layout(tp=2)),
    (f"{FULL} block --recompute-num-layers 2 --distribute-saved-activations", Layout(tp=2)),
    (FP16, SINGLE),
    (f"{FP16} --vocab-size 5000", SINGLE),
    (f"{FP16} {LLAMA}", SINGLE),
    (f"{FP16} --vocab-size 5000 --recompute-activations", SINGLE),
    *((f"{FP16} --zero-stage {stage}", Layout(dp=2)) for stage in range(1, 4)),
    (f"--zero-stage 2 {SMALL_BUCKETS}", Layout(dp=2)),
    (f"--zero-stage 2 {SMALL_BUCKETS} --overlap-grad-reduce", Layout(dp=2)),
    (f"--bf16 --zero-stage 2 {SMALL_BUCKETS} --overlap-grad-reduce", Layout(pp=2, dp=2)),
    ("--zero-stage 2 --overlap-grad-reduce", Layout(dp=2)),
    ("--zero-stage 2 --ddp-num-buckets 3", Layout(pp=2, vpp=2, dp=2)),
    ("--zero-stage 3 --reshard-every-microbatch", Layout(pp=2, dp=2)),
    ("--bf16 --zero-stage 3 --reshard-every-microbatch", Layout(pp=2, vpp=2, dp=2)),
    *((f"--zero-stage {stage} {HYBRID}", Layout(dp=4)) for stage in range(1, 4)),
    *(
        (f"--zero-stage {stage} --vocab-size 5000 {more}", layout)
        for stage in (2, 3)
        for more, layout in (
            ("", Layout(dp=2)),
            ("--untie-embeddings-and-output-weights", Layout(dp=2)),
            ("--bf16 --cross-entropy-loss-fusion", Layout(pp=2, dp=2)),
        )
    ),
    (f"--zero-stage 2 --vocab-size 5000 {SMALL_BUCKETS}", Layout(pp=2, dp=2)),
]


@pytest.mark.parametrize(
    ("flags", "layout"),
    [*DAILY, *(pytest.param(*case, marks=pytest.mark.full) for case in OTHERS)],
    ids=layout_id,
)
def test_the_peak_inside_a_step_is_the_predicted_one(corpus, flags, layout):
    words = command(corpus, STEPS, SHAPE, flags)
    config = build_config(parse([*words, *layout.flags, "--device", "cpu"]))
    predicted = predict_memory(config, layout.world_size)
    peaks = {}
    for pipeline_rank, peak, numel in train_and_inspect(
        words, layout, peak_of_the_step, providers=PROVIDERS
    ):
        assert numel == predicted[pipeline_rank].num_parameters
        peaks.setdefault(pipeline_rank, []).append(peak)
    assert len(peaks) == layout.pp
    for pipeline_rank, found in peaks.items():
        rank = predicted[pipeline_rank]
        # The ranks of a stage need the same, too.
        assert rank.activations + rank.workspace == pytest.approx(min(found), rel=0.1)


TOKENS = "--seq-length 16 --micro-batch-size 1 --global-batch-size 1 --vocab-size 5000"
LOW = "--bf16 --main-grads-dtype bf16"


@pytest.mark.parametrize("pieces", [50_000, None])
@pytest.mark.parametrize(
    "flags",
    [
        LOW,
        f"{LOW} --optimizer lion",
        pytest.param(f"{LOW} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", marks=pytest.mark.full),
        pytest.param(f"{LOW} --optimizer sgd", marks=pytest.mark.full),
        pytest.param("--optimizer lion", marks=pytest.mark.full),
        pytest.param("--optimizer muon", marks=pytest.mark.full),
        pytest.param(f"{LOW} --optimizer muon", marks=pytest.mark.full),
    ],
)
def test_the_peak_where_the_update_is_the_largest_moment(corpus, monkeypatch, flags, pieces):
    """Few tokens: the update widens gradients, all of them or, as with large models, in pieces."""
    if pieces is not None:
        monkeypatch.setattr(gradients, "PIECE_ELEMENTS", pieces)
    words = command(corpus, STEPS, SHAPE, TOKENS, flags)
    (rank,) = predict_memory(build_config(parse(words)), 1)
    ((_, peak, numel),) = train_and_inspect(words, SINGLE, peak_of_the_step, providers=PROVIDERS)
    assert numel == rank.num_parameters
    assert rank.activations + rank.workspace == pytest.approx(peak, rel=0.1)
    if pieces is not None:
        assert peak < 4 * numel


def held_bytes(state):
    """Pipeline rank and what it holds, as `--log-memory` counts it (see test_state_bytes.py)."""
    held = held_memory(state.chunks, state.optimizer, torch.device("cpu"))
    return state.chunks[0].context.pp.rank, asdict(held)


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ("--bf16 --zero-stage 1", Layout(pp=2, dp=2)),
        *(
            pytest.param(f"{flags} --zero-stage {stage}", layout, marks=pytest.mark.full)
            for flags in ("", "--bf16", FP16, LOW, "--optimizer lion", "--optimizer muon")
            for stage in range(4)
            for layout in (Layout(dp=2), Layout(pp=2, dp=2))
        ),
    ],
    ids=layout_id,
)
def test_the_table_tells_what_is_held_between_steps(corpus, flags, layout):
    words = command(corpus, 2, SHAPE, flags)
    predicted = predict_memory(build_config(parse([*words, *layout.flags])), layout.world_size)
    measured = {}
    for pipeline_rank, sizes in train_and_inspect(words, layout, held_bytes):
        for kind, size in sizes.items():
            measured.setdefault((pipeline_rank, kind), []).append(size)
    for (pipeline_rank, kind), sizes in measured.items():
        wanted = getattr(predicted[pipeline_rank], kind)
        assert sum(sizes) / len(sizes) == pytest.approx(wanted, rel=0.03), kind


def test_the_table_tells_what_goes_to_the_host(corpus):
    words = command(corpus, 2, "--bf16 --optimizer-cpu-offload --device cuda")
    ranks = predict_memory(build_config(parse(words)), 1)
    header, line = memory_table(ranks)
    assert header.endswith("in host memory")
    assert float(line.split("|")[-1]) == pytest.approx(ranks[0].in_host_memory / 2**20, abs=0.05)
    assert ranks[0].in_host_memory == 16 * ranks[0].num_parameters


def test_offloaded_layers_keep_nothing_on_the_device(corpus):
    layer = LayerActivations(kept=100, recomputed=5, gradients=7, boundary=3)
    for device, wanted in (("cuda", (200, [(200, 12), (0, 112)])), ("cpu", (400, [(400, 12)]))):
        words = command(corpus, 2, f"--cpu-offloading-num-layers 2 --device {device}")
        assert block_activations(build_config(parse(words)), layer, 4) == wanted


def test_the_table_has_a_line_for_every_pipeline_rank(corpus):
    config = build_config(parse([*command(corpus, 2), *Layout(pp=2, dp=2).flags]))
    ranks = predict_memory(config, 4)
    lines = memory_table(ranks)
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    assert ranks[0].peak == ranks[0].between_steps + ranks[0].activations + ranks[0].workspace


def test_an_unknown_vocabulary_is_refused(corpus):
    config = build_config(parse(command(corpus, 2)))
    config = replace(config, tokenizer=TokenizerConfig())
    with pytest.raises(ConfigError, match="vocabulary"):
        predict_memory(config, 1)


def test_the_log_tells_prediction_and_measure(corpus, capsys):
    words = command(corpus, 3, SHAPE, "--log-memory")
    train_and_inspect(words, SINGLE)
    told = [line.split("] ")[-1].strip() for line in capsys.readouterr().out.splitlines()]
    assert any("predicted memory of a rank, MiB:" in line for line in told)
    (at,) = (i for i, line in enumerate(told) if "memory of a rank after 2 steps, MiB" in line)
    assert "measured / predicted; the measured peak is the growth of the process" in told[at]
    header, row = ([cell.strip() for cell in line.split("|")] for line in told[at + 1 : at + 3])
    cells = dict(zip(header, row, strict=True))
    for name in ("parameters", "gradients", "main parameters", "moments", "between steps"):
        measured, predicted = map(float, cells[name].split("/"))
        assert measured == pytest.approx(predicted, rel=0.03, abs=0.051)
        assert measured > 0 or name == "main parameters"  # of fp32 there are none
    assert float(cells["peak"].split("/")[1]) > 0  # this process may have been larger before


def test_the_largest_rank_of_a_stage_is_told():
    held = [HeldMemory(*(size * 2**20 for size in (n, 2 * n, 0, 0, 5))) for n in (1, 3, 2)]
    measured = [MeasuredMemory(i // 2, each, 9 * 2**20) for i, each in enumerate(held)]
    lines = measured_table(measured, ())
    assert [line.split(" | ")[1].strip() for line in lines] == ["parameters", "3.0", "2.0"]
    assert [line.split(" | ")[5].strip() for line in lines] == ["between steps", "9.0", "6.0"]
    assert lines[0].endswith("in host memory")
