"""Two hundred right steps in six styles, torch's among them, on random batches: none misnamed."""

import pytest
import torch
from right_steps import RANKS, STYLES, check_not_misnamed, diagnose_style


def in_torch(params, data, weights):
    """Each rank's sum times the ranks over the global weight, averaged, as DDP averages."""
    x, y, w = (torch.tensor(each) for each in (*data, weights))
    ranks = []
    for rows in torch.arange(len(x)).chunk(RANKS):
        own = {name: torch.tensor(leaf, requires_grad=True) for name, leaf in params.items()}
        losses = (torch.tanh(x[rows] @ own["w"] + own["b"]) - y[rows]) ** 2
        ((losses * w[rows]).sum() * RANKS / w.sum()).backward()
        ranks.append({name: leaf.grad for name, leaf in own.items()})
    return {name: (sum(each[name] for each in ranks) / RANKS).numpy() for name in params}


@pytest.mark.parametrize("style", [*STYLES, "torch"])
def test_none_of_two_hundred_right_steps_is_misnamed(style):
    given = {"gradient_of": in_torch} if style == "torch" else {}
    right = [check_not_misnamed(diagnose_style(style, seed, **given)) for seed in range(100, 134)]
    assert sum(right) >= 24  # masks of even halves cannot tell
