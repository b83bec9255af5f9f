"""Muon against torch's own, against the singular value decomposition, and over dealt matrices."""

import math

import pytest
import torch
from torch import nn

from mcore import parallel_state
from mcore.distributed import DistributedDataParallelConfig, FullyShardedDataParallel
from mcore.errors import ConfigError
from mcore.optimizer import OptimizerConfig, get_megatron_optimizer
from mcore.optimizer.newton_schulz import (
    COEFFICIENTS,
    join_rows,
    orthogonalize,
    split_rows,
    update_scale,
)
from mcore.optimizer.whole_matrices import DealtMatrix, batches_of, map_whole_
from mcore.testing import run_distributed
from mcore.topology.flat_range import FlatRange
from mcore.topology.param_sharding import even_rows


@pytest.mark.parametrize("shape", [(12, 12), (6, 20), (20, 6)])
@pytest.mark.parametrize("kind", list(COEFFICIENTS))
def test_singular_values_are_mapped_and_directions_kept(shape, kind):
    """The iteration is an odd polynomial of the singular values: taken of them alone, in fp64."""
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    mapped = values / matrix.norm()
    for step in range(5):
        a, b, c = COEFFICIENTS[kind][step % len(COEFFICIENTS[kind])]
        mapped = a * mapped + b * mapped**3 + c * mapped**5
    expected = left @ torch.diag(mapped) @ right
    torch.testing.assert_close(orthogonalize(matrix, 5, COEFFICIENTS[kind]), expected)
    assert mapped.min() > 0.5
    assert mapped.max() < 1.3


def test_a_zero_matrix_stays_zero():
    assert not orthogonalize(torch.zeros(3, 4), 5, COEFFICIENTS["quintic"]).any()


def test_scales():
    assert update_scale(9, 4, "spectral") == 3.0
    assert update_scale(1, 4, "unit_rms_norm") == 0.5
    assert update_scale(1, 4, "shape_scaling") == 1.0
    assert update_scale(4, 1, "shape_scaling") == 2.0


def test_rows_are_split_by_kind_and_joined_again():
    matrix = torch.arange(24.0).view(8, 3)
    kinds = split_rows(matrix, (2, 1, 1))
    assert [k[:, 0].tolist() for k in kinds] == [[0, 3, 12, 15], [6, 18], [9, 21]]
    assert torch.equal(join_rows(kinds, (2, 1, 1)), matrix)


def make_net(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def backward(net, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 6, dtype=torch.float64, generator=generator).to(net[0].weight.dtype)
    net(x).pow(3).sum().backward()


class PlainMuon:
    """The formula in fp64 with the singular value decomposition in place of products."""

    def __init__(self, net, nesterov, kind, scale):
        self.net, self.nesterov, self.kind, self.scale = net, nesterov, kind, scale
        self.momenta = {p: torch.zeros_like(p) for p in net.parameters() if p.dim() == 2}
        vectors = [p for p in net.parameters() if p.dim() == 1]
        self.adam = torch.optim.AdamW(vectors, lr=0.02, weight_decay=0.0)

    @torch.no_grad()
    def step(self):
        self.adam.step()
        for p, momentum in self.momenta.items():
            momentum.mul_(0.95).add_(p.grad, alpha=0.05)
            used = 0.05 * p.grad + 0.95 * momentum if self.nesterov else momentum
            left, values, right = torch.linalg.svd(used, full_matrices=False)
            values = values / used.norm()
            for step in range(5):
                a, b, c = COEFFICIENTS[self.kind][step % len(COEFFICIENTS[self.kind])]
                values = a * values + b * values**3 + c * values**5
            rows, columns = p.shape
            factor = math.sqrt(self.scale(rows, columns))
            p.mul_(1 - 0.02 * 0.1)
            p.sub_(left @ torch.diag(values) @ right, alpha=0.02 * factor)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("kind", ["quintic", "simple"])
@pytest.mark.parametrize(
    ("mode", "scale"),
    [
        ("spectral", max),
        ("unit_rms_norm", lambda rows, columns: rows / columns),
        ("shape_scaling", lambda rows, columns: max(1.0, rows / columns)),
    ],
)
def test_equals_the_formula_in_fp64(nesterov, kind, mode, scale):
    ours, theirs = make_net(), make_net()
    config = OptimizerConfig(
        optimizer="muon",
        lr=0.02,
        weight_decay=0.1,
        clip_grad=0.0,
        muon_nesterov=nesterov,
        muon_coefficient_type=kind,
        muon_scale_mode=mode,
    )
    optimizer, reference = (
        get_megatron_optimizer(config, [ours]),
        PlainMuon(theirs, nesterov, kind, scale),
    )
    for step in range(4):
        for net in (ours, theirs):
            net.zero_grad()
            backward(net, step)
        optimizer.step()
        reference.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_follows_torchs_own_within_its_bf16_products():
    ours, theirs = make_net(torch.float32), make_net(torch.float32)
    config = OptimizerConfig(
        optimizer="muon",
        lr=0.02,
        weight_decay=0.1,
        clip_grad=0.0,
        muon_nesterov=True,
        muon_coefficient_type="simple",
        muon_scale_mode="shape_scaling",
    )
    optimizer = get_megatron_optimizer(config, [ours])
    matrices = [p for p in theirs.parameters() if p.dim() == 2]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    references = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True),
        torch.optim.AdamW(vectors, lr=0.02, weight_decay=0.0),
    ]
    start = [p.detach().clone() for p in ours.parameters()]
    for step in range(3):
        for net in (ours, theirs):
            net.zero_grad()
            backward(net, step)
        optimizer.step()
        for reference in references:
            reference.step()
    for p, q, before in zip(ours.parameters(), theirs.parameters(), start, strict=True):
        assert (p - q).norm() <= 0.03 * (q - before).norm()


def test_a_skipped_update_changes_nothing():
    net = make_net()
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="muon", lr=0.02), [net])
    backward(net, 0)
    optimizer.step()
    before = [t.clone() for _, _, s in optimizer.named_states() for t in s.values()]
    before += [p.detach().clone() for p in net.parameters()]
    net.zero_grad()
    backward(net, 1)
    net[2].bias.grad[0] = torch.nan
    assert not optimizer.step().update_successful
    after = [t for _, _, s in optimizer.named_states() for t in s.values()]
    after += [p.detach() for p in net.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert optimizer.step_count == 1


def test_state_names_and_groups():
    net = make_net()
    config = OptimizerConfig(optimizer="muon", lr=0.02)
    states = {n: set(s) for n, _, s in get_megatron_optimizer(config, [net]).named_states()}
    assert states["0.weight"] == {"momentum_buffer"}
    assert states["1.weight"] == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(muon_tp_mode="blockwise"), "the same at every layout"),
        (dict(muon_num_ns_steps=0), "from 1 up"),
        (dict(optimizer="muon", decoupled_weight_decay=False), "L2"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(ConfigError, match=words):
        OptimizerConfig(lr=0.1, **options)


def double_everywhere(shapes):
    """Every matrix is dealt by rows over two ranks and by flat runs over the other two."""
    context = parallel_state.initialize_model_parallel(2)
    dealt, wholes = [], []
    for number, (rows, columns) in enumerate(shapes):
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
        sharding = even_rows(rows, context.tp).sharding(columns)
        (piece,) = sharding.pieces
        local = whole[piece.global_start : piece.global_start + piece.length]
        cut = local.numel() // 3  # uneven runs; the second rank may have all of it
        cut = 0 if number == 0 else cut
        start, end = ((0, cut), (cut, local.numel()))[context.dp.rank]
        run = FlatRange(tuple(local.shape), start, end - start) if end > start else None
        own = local.reshape(-1)[start:end].clone() if run is not None else None
        dealt.append((DealtMatrix(f"m{number}", sharding, run), own))
        wholes.append((local, start, end, whole))
    axes = (context.dp, context.tp)
    for batch in batches_of(dealt, axes):
        map_whole_(batch, lambda _, w: w @ w.t() @ w, axes, torch.zeros(0).double())
    results = []
    for (_, own), (local, start, end, whole) in zip(dealt, wholes, strict=True):
        first = context.tp.rank * local.shape[0]
        expected = (whole @ whole.t() @ whole)[first : first + local.shape[0]]
        if own is not None:
            results.append(torch.equal(own, expected.reshape(-1)[start:end]))
    return results


@pytest.mark.dist
def test_each_matrix_is_computed_whole():
    for results in run_distributed(double_everywhere, 4, [(4, 3), (6, 5), (2, 7), (8, 8), (4, 4)]):
        assert results
        assert all(results)


def states_of_one_row():
    parallel_state.initialize_model_parallel()
    options = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    chunk = FullyShardedDataParallel(None, options, nn.Linear(6, 1))
    config = OptimizerConfig(optimizer="muon", lr=0.02)
    optimizer = get_megatron_optimizer(config, [chunk])
    return [
        {key: state.numel() for key, state in states.items()}
        for name, _, states in optimizer.named_states()
        if name == "weight"
    ]


@pytest.mark.dist
def test_an_empty_shard_has_a_momentum():
    wanted = [[{"momentum_buffer": 6}], [{"momentum_buffer": 0}]]
    assert run_distributed(states_of_one_row, 2) == wanted
