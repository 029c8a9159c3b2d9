"""The encoders against their equations: how far a TCN sees, R-GCN step by step, the positions of the Transformer."""

import math

import numpy as np
import pytest
import torch
from paper_baselines.rgcn import RelationalConvolutions, relations
from paper_baselines.tcn import SIZES, TAPS, TemporalConvolutions
from paper_baselines.transformer import WIDTH, CausalAttention, positions
from torch import Tensor, nn

LENGTH = 80


def reached(encoder: nn.Module, width: int, at: int) -> Tensor:
    """Which steps the context at one place depends on, bool [LENGTH]."""
    torch.manual_seed(0)
    steps = torch.randn(1, LENGTH, width, requires_grad=True)
    context = encoder.eval()(steps, torch.zeros(1, LENGTH, dtype=torch.int64))[0, at]
    context.square().sum().backward()
    assert steps.grad is not None
    return steps.grad[0].abs().sum(dim=1) > 0


@pytest.mark.parametrize("size", SIZES)
def test_a_tcn_sees_the_steps_its_formula_says_and_no_later_one(size: str) -> None:
    torch.manual_seed(0)
    channels, blocks = SIZES[size]  # type: ignore[index]
    seen = reached(TemporalConvolutions(channels, blocks, 0.2), channels, at=70)
    field = 1 + 2 * (TAPS - 1) * (2**blocks - 1)
    assert field == {"small": 13, "large": 61}[size]
    assert torch.nonzero(seen)[:, 0].tolist() == list(range(71 - field, 71))


def test_a_transformer_sees_every_step_so_far_and_no_later_one() -> None:
    torch.manual_seed(0)
    assert torch.nonzero(reached(CausalAttention(1, 0.2), WIDTH, at=70))[:, 0].tolist() == list(range(71))


def test_positions_are_those_of_the_paper() -> None:
    table = positions(50)
    for place, i in ((0, 0), (7, 3), (49, 31)):
        angle = place / 10000 ** (2 * i / WIDTH)
        assert float(table[place, 2 * i]) == pytest.approx(math.sin(angle), abs=1e-5)
        assert float(table[place, 2 * i + 1]) == pytest.approx(math.cos(angle), abs=1e-5)


def test_the_relations_of_a_workflow_by_hand() -> None:
    # a b a c a: what came before, the same agent before, what came after it, everything before.
    found = relations(torch.tensor([[0, 1, 0, 2, 0]]))[0]
    neighbours = [[torch.nonzero(row)[:, 0].tolist() for row in relation] for relation in found]
    assert neighbours == [
        [[], [0], [1], [2], [3]],
        [[], [], [0], [], [0, 2]],
        [[], [], [1], [], [1, 3]],
        [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3]],
    ]
    assert set(found.sum(dim=2).flatten().tolist()) == {0.0, 1.0}
    assert found[3, 4, :4].tolist() == [0.25] * 4


def test_padding_is_nobodys_neighbour() -> None:
    found = relations(torch.tensor([[0, 0, -1, -1]]))[0]
    assert not found[:, :2, 2:].any()


def test_eq_2_step_by_step() -> None:
    torch.manual_seed(0)
    agents = torch.tensor([[0, 1, 0, 0, 2, 1]])
    encoder = RelationalConvolutions(4, 2, 0.3).eval()
    steps = torch.randn(1, 6, 4)
    shares = relations(agents)[0]
    hidden = steps[0]
    for own, of_relation in zip(encoder.own, encoder.of_relation, strict=True):
        W = of_relation.weight.view(4, 4, 4)  # out, relation, in
        after = []
        for i in range(6):
            total = own.weight @ hidden[i] + own.bias
            for r in range(4):
                neighbours = torch.nonzero(shares[r, i])[:, 0].tolist()
                for j in neighbours:
                    total = total + (W[:, r] @ hidden[j]) / len(neighbours)
            after.append(torch.relu(total))
        hidden = torch.stack(after)
    np.testing.assert_allclose(encoder(steps, agents)[0].detach().numpy(), hidden.detach().numpy(), atol=1e-5)
