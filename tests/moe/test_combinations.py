"""The page's table of combinations: every pair of options trains a step on 4 ranks, or is refused.

``python tests/moe/test_combinations.py`` writes the page.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from helpers.distributed import run_ranks
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import training
from fairseq_tutel.distributed import build_groups
from fairseq_tutel.moe import ExchangeConfig, MoELayer

PAGE = Path(__file__).parents[2] / "fairseq_tutel" / "moe" / "README.md"
BEGIN, END = "<!-- the tables -->\n", "<!-- end of the tables -->\n"
WIDTH, TOKENS = 16, 8


class Option(NamedTuple):
    """An option of the page: arguments of the layer, its exchange and its groups."""

    name: str
    layer: dict = {}
    exchange: dict = {}
    groups: dict = {}
    needs: dict = {}  # of the layer, unless the other option gives something else


def _expert():
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())


OPTIONS = (
    Option("a capacity (`capacity_factor=1`)", {"capacity_factor": 1.0}),
    Option("no capacity (`capacity_factor=0`)", {"capacity_factor": 0}),
    Option("2DH", exchange={"algorithm": "2dh", "ranks_per_node": 2}),
    Option("overlap", exchange={"overlap_degree": 2}),
    Option("wire formats", exchange={"wire": "bf16"}),
    Option("compact rows", exchange={"wire_compact": True}),
    Option("balance of ranks", exchange={"balance_ranks": True}, needs={"capacity_factor": 0}),
    Option("expert groups (P < W)", groups={"expert_parallel_size": 2}),
    Option("slices (E < W)", {"top_k": 1}, {"r": 2}, {"placement": "sliced", "num_experts": 2}),
    Option("weights that travel (`r=0`)", exchange={"r": 0}),
    Option("`activation_memory='lean'`", {"activation_memory": "lean"}),
    Option("activation checkpointing"),
    Option("fp8 experts", {"expert_compute": "fp8"}),
    Option("your own experts", {"expert_fn": _expert}),
    Option("a module as gate", {"gate": True}),
    Option("LoRA"),
    Option("given choices"),
    Option("local drop", {"local_drop": 0.5}),
    Option("null experts", {"null_experts": 2}),
    Option("load bias", {"load_bias": "quantile"}),
    Option("rerouting", {"overflow_rerouting": 2}, needs={"capacity_factor": 1.0}),
    Option("shared expert", {"shared_expert_dim": 16}),
    Option("balance over the update", {"balance_scope": "update"}),
)


def _try(first: Option, second: Option) -> None:
    names = {first.name, second.name}
    groups = build_groups(**{"num_experts": 4, **first.groups, **second.groups})
    exchange = ExchangeConfig(**first.exchange, **second.exchange)
    options = first.needs | second.needs | first.layer | second.layer
    if "expert_fn" not in options:
        options["hidden_dim"] = 4 * WIDTH
    if "gate" in options:
        outputs = groups.num_experts + options.get("null_experts", 0)
        options["gate"] = torch.nn.Linear(WIDTH, outputs)
    layer = MoELayer(WIDTH, groups.num_experts, groups=groups, exchange=exchange, **options)
    if "LoRA" in names:
        training.add_lora(layer, rank=2)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), layer)
    training.prepare_data_parallel(model)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.01)
    given: dict = {"return_aux": True}
    if "given choices" in names:
        given["choices"] = torch.arange(layer.config.top_k).expand(TOKENS, -1)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    if "activation checkpointing" in names:
        y, aux = checkpoint(layer, x, use_reentrant=False, **given)
    else:
        y, aux = layer(x, **given)
    (y.square().mean() + aux.loss).backward()
    optimizer.step()
    assert y.isfinite().all() and y.shape == x.shape


def refusals() -> list[tuple[str, str]]:
    """Return the refused pairs of options, as every rank finds them."""
    found = []
    for first, second in itertools.combinations(OPTIONS, 2):
        if (
            first.layer.keys() & second.layer.keys()
            or first.exchange.keys() & second.exchange.keys()
        ):
            continue  # two values of one option
        try:
            _try(first, second)
        except (ValueError, TypeError):
            found.append((first.name, second.name))
    return found


def tables(found: list[tuple[str, str]]) -> str:
    """Return the refused pairs as the page has them."""
    lines = ["| option | not with |", "|---|---|"]
    for first, pairs in itertools.groupby(found, key=lambda pair: pair[0]):
        lines.append(f"| {first} | {'; '.join(second for _, second in pairs)} |")
    return "\n".join([*lines, ""])


@pytest.mark.long
def test_the_page_names_the_pairs_that_are_refused():
    of_ranks = run_ranks(refusals, 4, timeout=280)
    assert all(found == of_ranks[0] for found in of_ranks)
    on_page = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert tables(of_ranks[0]) == on_page


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    new = tables(run_ranks(refusals, 4, timeout=300)[0])
    PAGE.write_text(before + BEGIN + new + END + rest.partition(END)[2], encoding="utf-8")
