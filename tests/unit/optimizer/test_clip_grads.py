import pytest
import torch
from torch import nn

from mcore import parallel_state
from mcore.optimizer import OptimizerConfig, get_megatron_optimizer
from mcore.optimizer.clip_grads import clip_factor, get_grad_norm
from mcore.testing import run_distributed
from mcore.topology.group import Group
from mcore.topology.param_sharding import ParamSharding, Piece, set_sharding

SINGLE = Group.single("tp-pp")
CPU = torch.device("cpu")


def test_norm_of_many_elements_is_exact():
    grad = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    norm = get_grad_norm([grad], [SINGLE], CPU).item()
    assert norm == pytest.approx(grad.double().norm().item(), rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_of_pieces(dtype):
    shapes = [(), (1,), (1024,), (3, 1000), (7, 5)]
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    grads.append(torch.randn(8, 6, generator=generator).to(dtype)[:, 1:4])
    expected = torch.cat([g.double().flatten() for g in grads]).norm().item()
    assert get_grad_norm(grads, [SINGLE], CPU).item() == pytest.approx(expected, rel=1e-6)
    assert get_grad_norm([], [SINGLE], CPU).item() == 0.0


@pytest.mark.parametrize("max_norm", [0.1, 3.0, 1e6])
def test_clipping_equals_torch(max_norm):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(7))]
    for param in params:
        param.grad = torch.randn_like(param)
    grads = [param.grad.clone() for param in params]
    norm = get_grad_norm(grads, [SINGLE], CPU)
    torch._foreach_mul_(grads, clip_factor(max_norm, norm))
    expected = nn.utils.clip_grad_norm_(params, max_norm)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    for grad, param in zip(grads, params, strict=True):
        torch.testing.assert_close(grad, param.grad, rtol=1e-6, atol=1e-9)
        assert max_norm < 1e6 or torch.equal(grad, param.grad)


def whole(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Stage(nn.Module):
    """This rank's part of a made-up model of four logical parameters, with gradients set."""

    def __init__(self, context):
        super().__init__()
        rank = context.tp.rank
        # 5 rows in parts of 3: the last rank's third row is padding, its gradient must not count.
        grad = torch.full((3, 2), 1e6, dtype=torch.float64)
        rows = 3 - rank
        grad[:rows] = whole(5, 2, seed=1)[3 * rank : 3 * rank + rows]
        vocabulary = ParamSharding((5, 2), 0, (Piece(0, 3 * rank, rows),))
        if context.pp.is_first:
            self.add("embedding", grad, vocabulary)
            self.add("norm", whole(4, seed=2))
        if context.pp.is_last:
            tied = ParamSharding((5, 2), 0, vocabulary.pieces, tied_key="embedding")
            self.add("head", grad, tied)
            columns = whole(3, 4, seed=3)[:, 2 * rank : 2 * rank + 2]
            self.add("row", columns, ParamSharding((3, 4), 1, (Piece(0, 2 * rank, 2),)))
            # Rows 0 and 1 are queries, one per rank; row 2 is a key that both ranks hold.
            mine = whole(3, 2, seed=4)[[rank, 2]]
            pieces = (Piece(0, rank, 1), Piece(1, 2, 1, is_owner=rank == 0, is_shared=True))
            self.add("qkv", mine, ParamSharding((3, 2), 0, pieces))

    def add(self, name, grad, sharding=None):
        param = nn.Parameter(torch.zeros_like(grad))
        param.grad = grad.clone()
        if sharding is not None:
            set_sharding(param, sharding)
        self.register_parameter(name, param)


def norm_of_a_cut_model(tp, pp):
    context = parallel_state.initialize_model_parallel(tp, pp)
    stage = Stage(context)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1.0, clip_grad=0.0), [stage])
    return optimizer.step().grad_norm.item()


@pytest.mark.dist
@pytest.mark.parametrize("pp", [1, 2])
def test_every_logical_parameter_counts_once(pp):
    parts = [whole(5, 2, seed=1), whole(4, seed=2), whole(3, 4, seed=3), whole(3, 2, seed=4)]
    expected = torch.cat([part.flatten() for part in parts]).norm().item()
    for norm in run_distributed(norm_of_a_cut_model, 4, 2, pp):
        assert norm == pytest.approx(expected, rel=1e-14)


def test_the_update_is_bounded_and_the_norm_is_that_before_clipping():
    """Plain SGD at rate 1 moves by the clipped gradient."""
    torch.manual_seed(0)
    net = torch.nn.Linear(20, 10)
    for limit, bound in ((0.5, 0.5), (0.0, torch.inf)):
        before = [p.detach().clone() for p in net.parameters()]
        config = OptimizerConfig(
            optimizer="sgd", lr=1.0, sgd_momentum=0.0, weight_decay=0.0, clip_grad=limit
        )
        optimizer = get_megatron_optimizer(config, [net])
        net.zero_grad()
        (net(torch.ones(4, 20)) * 3).sum().backward()
        norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
        result = optimizer.step()
        pairs = zip(net.parameters(), before, strict=True)
        moved = torch.cat([(p.detach() - q).flatten() for p, q in pairs]).norm()
        assert moved <= bound * (1 + 1e-5)
        assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-6)
        assert norm > 0.5
        if limit == 0.0:
            assert float(moved) == pytest.approx(float(norm), rel=1e-4)
