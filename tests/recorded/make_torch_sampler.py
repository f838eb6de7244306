"""Writes torch_sampler.json: what torch's DistributedSampler and randperm give.

Needs torch, of the version that the record names.

    python tests/recorded/make_torch_sampler.py
"""

import itertools
from pathlib import Path
from typing import Any

import layout
import torch
from torch.utils.data import DistributedSampler

SIZES = ([0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 13, 16, 17, 21, 22], [1, 2, 3, 4, 5, 7, 8])
SHUFFLED = [(0, 2), (1, 4), (3, 7), (7, 2), (10, 3), (10, 4), (13, 4), (22, 3), (101, 4)]
SEEDS = [(0, 0), (0, 1), (1, 0), (42, 0), (42, 5), (1234, 7)]
ORDERS = list(
    itertools.product([0, 1, 42, 1234, 2**31, 2**32 - 1, 2**32, 2**32 + 5], [1, 2, 10, 33])
)


def lists_of(n: int, ranks: int, drop_last: bool, shuffle: bool, seed: int, epoch: int) -> Any:
    lists = []
    for rank in range(ranks):
        sampler = DistributedSampler(
            range(n),  # type: ignore[arg-type] - it asks for the length alone
            num_replicas=ranks,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        sampler.set_epoch(epoch)
        lists.append(list(sampler))
    return [n, ranks, drop_last, shuffle, seed, epoch, lists]


def order_of(seed: int, n: int) -> Any:
    return [seed, n, torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()]


def make() -> dict[str, Any]:
    plain = [
        lists_of(n, ranks, drop_last, False, 0, 0)
        for n, ranks, drop_last in itertools.product(*SIZES, (False, True))
    ]
    shuffled = [
        lists_of(n, ranks, drop_last, True, *seeds)
        for (n, ranks), drop_last, seeds in itertools.product(SHUFFLED, (False, True), SEEDS)
    ]
    return {
        "torch": torch.__version__,
        "note": "rows: n,W,drop_last,shuffle,seed,epoch -> per-rank index lists; produced by "
        "running torch.utils.data.DistributedSampler",
        "cases": plain + shuffled,
        "randperm": [order_of(seed, n) for seed, n in ORDERS],
    }


if __name__ == "__main__":
    layout.write(make, Path(__file__).parent / "torch_sampler.json")
