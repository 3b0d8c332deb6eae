"""The product of choices on the way through the experts, against a loop over tokens in fp64.

A cell is one value of each axis. Each pair of values occurs in a cell. A cell equals the loop, or
is refused with its words.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers.distributed import run_ranks
from helpers.pairs import cover_pairs
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import ops
from fairseq_tutel.config import ExchangeConfig
from fairseq_tutel.distributed import build_groups, process_world
from fairseq_tutel.moe import MoELayer
from fairseq_tutel.moe.experts import LoRAExperts, Stacked, StackedExperts, register_experts

M, H, K = 16, 32, 2  # widths that fp8 can multiply
TOKENS = (9, 14)  # of each rank
AXES = {
    "network": ("ffn", "swiglu", "geglu", "clamped_swiglu", "leaky", "modules"),
    "keep": ("fast", "lean", "minimal", "lean fp8"),
    "compute": ("same", "fp8"),
    "held": ("trained", "bf16", "int8", "mapped"),
    "lora": ("none", "same", "bf16", "int8"),
    "place": ("alone", "ranks", "r=0", "slices r=1", "slices r=2"),
    "degree": (1, 2, 4),
    "wire": ("same", "bf16", "fp8"),
    "helped": (False, True),
    "padded": (False, True),
    "skewed": (False, True),  # one expert has a row of each token, another one has none
    "autocast": (False, True),
    "observed": (False, True),  # whether the experts have a hook
    "recompute": (None, True, False),
    "frozen": ("nothing", "experts", "tokens"),
    "kernels": (False,),
}
# by Triton's kernels, which compute in fp32; with all that is kept: test_backends.py
IN_KERNELS = [
    {"network": "ffn", "keep": "lean", "observed": True},
    {"network": "geglu", "keep": "lean", "skewed": True},
    {"network": "geglu", "keep": "minimal", "padded": True},
    {"network": "geglu", "keep": "lean", "place": "ranks", "degree": 2},
    {"network": "leaky", "place": "ranks", "degree": 2},
    {"network": "ffn", "compute": "fp8", "padded": True},
    {"network": "swiglu", "compute": "fp8", "keep": "minimal"},
]
OPTIONS = {
    "swiglu": {"bias": True},
    "geglu": {},
    "clamped_swiglu": {"bias": True, "alpha": 1.5, "shift": 0.5},
}


@register_experts("leaky")
class Leaky(StackedExperts):
    """leaky relu between two projections, with a bias that is added to the output"""

    # its layout depends on options alone: no tensor is declared before an object is made
    @classmethod
    def layout_for(cls, options):
        return {
            "up": Stacked("FM", "up.weight"),
            "down": Stacked("MF", "down.weight"),
            "shift": Stacked("M", "down.bias"),
        }

    def compute(self, prepared, rows, offsets):
        up, down, shift = prepared.params
        hidden = F.leaky_relu(self.product(rows, up, offsets))
        return self.product(hidden, down, offsets, shift)


def expert_of(x, network, w):
    """One expert on rows [n, M]; ``w`` are its tensors by name."""
    if network == "leaky":
        return F.leaky_relu(x @ w["up.weight"].t()) @ w["down.weight"].t() + w["down.bias"]

    def linear(x, layer):
        return F.linear(x, w[f"{layer}.weight"], w.get(f"{layer}.bias"))

    hidden = linear(x, "fc1")
    if network in ("swiglu", "geglu"):
        hidden = (F.silu if network == "swiglu" else F.gelu)(linear(x, "fc_gate")) * hidden
    elif network == "clamped_swiglu":
        gate = linear(x, "fc_gate").clamp(max=7)
        hidden = gate * torch.sigmoid(1.5 * gate) * (hidden.clamp(-7, 7) + 0.5)
    else:
        hidden = F.gelu(hidden)
    return linear(hidden, "fc2")


def shapes_of(network):
    if network == "leaky":
        return {"up.weight": (H, M), "down.weight": (M, H), "down.bias": (M,)}
    outputs = {"fc_gate": H} if "glu" in network else {}
    outputs |= {"fc1": H, "fc2": M}
    shapes = {f"{layer}.weight": (size, H + M - size) for layer, size in outputs.items()}
    if network != "geglu":
        shapes |= {f"{layer}.bias": (size,) for layer, size in outputs.items()}
    return shapes


def invalid(cell):
    """Whether axes of a cell exclude each other without a refusal."""
    if cell.held != "trained" and (cell.recompute is not None or cell.frozen != "nothing"):
        return True  # evaluation has no gradients
    if cell.held != "trained" and cell.lora != "none":
        return True  # LoRA has storages of its own
    if cell.lora != "none" and cell.frozen == "experts":
        return True
    return cell.recompute is True and cell.frozen == "tokens"  # nothing needs a gradient


def refused(plain, names):
    """A cell of a pair of values that no cell computes."""
    if "helped" in names and "place" not in names:
        plain.place = "ranks"
    return None if invalid(plain) else plain


def cells(kernels):
    """Cells that compute and hold each pair of values; for a refused pair a plain cell."""
    if kernels:
        plain = {name: values[0] for name, values in AXES.items()}
        return [SimpleNamespace(**{**plain, "kernels": True, **cell}) for cell in IN_KERNELS]
    return cover_pairs(AXES, lambda cell: not invalid(cell) and words(cell) is None, refused)


def words(cell):
    """What a refused cell is refused with; None for a cell that computes."""
    built, own = cell.network in ("ffn", "swiglu", "geglu"), cell.network == "modules"
    sliced = cell.place.startswith("slices")
    if sliced and own:
        return "cannot be cut"
    if own and (cell.keep != "fast" or cell.compute == "fp8" or cell.held != "trained"):
        return "says what the experts are"
    if cell.held != "trained" and cell.compute == "fp8":
        return "has its own"
    if cell.compute == "fp8" and not built:
        return "networks ffn, swiglu and geglu"
    if cell.keep == "lean fp8" and cell.held == "trained" and not built:
        return "activation_storage='fp8' is for the networks"
    if cell.held != "trained" and sliced:
        return "whole experts"
    if cell.place == "r=0" and (own or cell.held != "trained"):
        return "cannot be gathered"
    if cell.helped:
        if cell.place in ("r=0", "slices r=1", "slices r=2") or own or cell.held != "trained":
            return "balance_ranks=True moves whole experts"
        if cell.padded:
            return "needs capacity_factor=0"
    return "LoRA is for" if cell.lora != "none" and own else None


def tensors_of(cell):
    """Weights of all experts by number and name, LoRA's, tokens, weights and choices; fp64."""
    generator = torch.Generator().manual_seed(5)
    experts = 1 if cell.place.startswith("slices") else 4

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights, updates = [], []
    for _ in range(experts):
        shapes = shapes_of(cell.network)
        weights.append({name: draw(*shape) / shape[-1] ** 0.5 for name, shape in shapes.items()})
        updates.append({})
        for name, shape in shapes.items():
            if len(shape) == 2:
                layer = name.rpartition(".")[0]
                updates[-1][f"{layer}.lora_A"] = draw(2, shape[1]) / shape[1] ** 0.5
                updates[-1][f"{layer}.lora_B"] = draw(shape[0], 2) / 2
    count = sum(TOKENS)
    top_k = min(K, experts)
    scores = draw(count, experts)
    if cell.skewed:
        scores[:, 0], scores[:, -1] = 9, -9
    choices = scores.topk(top_k, 1).indices
    return weights, updates, draw(count, M), draw(count, top_k).abs(), choices, draw(count, M)


def tolerance(cell):
    """Largest relative error: rounding of fp64, or of the formats in which a cell computes."""
    rounded = (cell.compute == "fp8") + (cell.keep == "lean fp8") + cell.autocast
    rounded += cell.wire != "same" and cell.place != "alone"
    fp32 = cell.kernels or cell.lora in ("int8", "bf16")  # A and B
    return 0.09 * rounded + 0.01 * (cell.held in ("int8", "bf16")) + 3e-6 * fp32 or 1e-11


def as_held(cell, name, value):
    """The numbers that a frozen weight or bias has as it is held."""
    held = cell.held if cell.lora == "none" else cell.lora
    if held == "bf16":
        return value.bfloat16().double()
    if held != "int8" or not name.endswith(".weight"):
        return value
    if cell.place.startswith("slices") and len(value) == M:  # each slice has its own scales
        alone = SimpleNamespace(held=held, lora="none", place="alone")
        return torch.cat([as_held(alone, name, part) for part in value.chunk(2, 1)], 1)
    scale = (value.float().abs().amax(1, keepdim=True) / 127).bfloat16().double()
    return scale * (value / scale).round().clamp(-127, 127)


def oracle(cell):
    """y, and gradients of tokens, weights and experts' tensors by (expert, name)."""
    weights, updates, x, weight, choices, target = tensors_of(cell)
    weights = [{name: as_held(cell, name, v) for name, v in own.items()} for own in weights]
    leaves = {"x": x, "weight": weight}
    for expert, own in enumerate(weights):
        leaves |= {(expert, name): value for name, value in own.items()}
        leaves |= {(expert, name): value for name, value in updates[expert].items()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    y = []
    for t, x_M in enumerate(x):
        y_M = torch.zeros(M, dtype=torch.float64)
        for k, expert in enumerate(choices[t].tolist()):
            own = dict(weights[expert])
            if cell.lora != "none":
                for name in [each for each in own if each.endswith(".weight")]:
                    layer = name.rpartition(".")[0]
                    a, b = (updates[expert][f"{layer}.lora_{factor}"] for factor in "AB")
                    own[name] = own[name] + 1.5 * b @ a
            y_M = y_M + weight[t, k] * expert_of(x_M[None], cell.network, own)[0]
        y.append(y_M)
    y = torch.stack(y)
    (y * target).sum().backward()
    return y.detach(), {
        key: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad  # no rows
        for key, leaf in leaves.items()
    }


def own_expert():
    return nn.Sequential(nn.Linear(M, H), nn.GELU(), nn.Linear(H, M))


OWN_NAMES = {f"{n}.{kind}": f"fc{1 + n // 2}.{kind}" for n in (0, 2) for kind in ("weight", "bias")}


def build(cell):
    place, experts = cell.place, 1 if cell.place.startswith("slices") else 4
    placement = "sliced" if place.startswith("slices") else "replicated"
    groups = build_groups(experts, placement=placement)
    r = {"r=0": 0, "slices r=2": 2}.get(place, 1)
    keep, _, storage = cell.keep.partition(" ")
    given = {"activation_memory": keep, "activation_storage": storage or "same"}
    given |= {"expert_compute": cell.compute}
    if cell.held != "trained":
        given["expert_storage"] = cell.held
    if cell.network == "modules":
        default = {"activation_memory": "fast", "activation_storage": "same"}
        default |= {"expert_compute": "same"}
        # beside modules, giving a default is refused, too
        given = dict(given.items() - default.items()) | {"expert_fn": own_expert}
    else:
        options = OPTIONS.get(cell.network)
        given |= {"hidden_dim": H, "expert_network": cell.network, "expert_options": options}
    helped = {"balance_ranks": True, "balance_tolerance": 1.0, "balance_min_rows": 1}
    more = helped if cell.helped else {}
    exchange = ExchangeConfig(overlap_degree=cell.degree, r=r, wire=cell.wire, **more)
    factor = float(experts) if cell.padded else 0.0
    factors = {"capacity_factor": factor, "eval_capacity_factor": factor}
    given |= {"groups": groups, "exchange": exchange, "top_k": min(K, experts), **factors}
    return MoELayer(M, experts, seed=1, **given)


def load(cell, layer):
    weights, updates, *_ = tensors_of(cell)
    groups = layer.groups
    state = {"gate.wg.weight": torch.zeros_like(layer.gate.wg.weight)}
    names = {v: k for k, v in OWN_NAMES.items()} if cell.network == "modules" else {}
    for slot, expert in enumerate(groups.local_experts):
        for name, value in weights[expert].items():
            state[f"experts.{slot}.{names.get(name, name)}"] = value
    layer.load_state_dict(state)
    if cell.lora != "none":
        layer.experts = LoRAExperts(layer.experts, 2, 3.0, cell.lora)
        for slot, expert in enumerate(groups.local_experts):
            for name, value in updates[expert].items():
                state[f"experts.{slot}.{name}"] = value
        layer.load_state_dict(state)


def run(cell):
    """y and gradients of a rank, by name; or the words of the refusal."""
    rank, world = process_world()
    *_, x, weight, choices, target = tensors_of(cell)
    begin = sum(TOKENS[:rank]) if world > 1 else 0
    mine = slice(begin, begin + TOKENS[rank] if world > 1 else None)
    x, weight, choices, target = x[mine], weight[mine], choices[mine], target[mine]
    try:
        layer = build(cell)
        fp32 = cell.autocast or cell.kernels
        layer = layer if fp32 else layer.double()
        ops.set_backend("triton" if cell.kernels else "auto")
        load(cell, layer)
        if cell.observed:
            layer.experts.register_forward_hook(lambda *call: None)
        dtype = torch.float32 if fp32 else torch.float64
        x, weight = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        if cell.frozen == "experts":
            layer.experts.requires_grad_(False)
        elif cell.frozen == "tokens":
            x.requires_grad_(False)

        def call(x):
            return layer(x, choices=choices, weights=weight)

        with torch.autocast("cpu", torch.bfloat16, enabled=cell.autocast):
            if cell.held != "trained":
                layer.eval()
                with torch.no_grad():
                    return call(x).double(), {}
            if cell.recompute is None:
                y = call(x)
            else:
                y = checkpoint(call, x, use_reentrant=cell.recompute)
        (y.double() * target).sum().backward()
    except ValueError as error:
        return str(error)
    grads = {"x": x.grad, "weight": weight.grad}
    for name, param in layer.experts.named_parameters():
        if not param.requires_grad:
            continue
        if cell.network == "modules":
            slot, _, leaf = name.partition(".")
            pairs = [(f"{slot}.{OWN_NAMES[leaf]}", param.grad)]
        else:
            pairs = zip(layer.experts.single_names()[name], param.grad, strict=True)
        for single, grad in pairs:
            slot, _, leaf = single.partition(".")
            grads[layer.groups.local_experts[int(slot)], leaf] = grad
    return y.detach().double(), {k: None if g is None else g.double() for k, g in grads.items()}


def _run_all(chosen):
    found = []
    for cell in chosen:
        try:
            found.append(run(cell))
        except Exception as error:
            raise AssertionError(str(cell)) from error
    return found


def check(cell, by_rank):
    want_words = words(cell)
    refusals = [each for each in by_rank if isinstance(each, str)]
    assert len(refusals) == (len(by_rank) if want_words else 0), (cell, by_rank)
    assert all(want_words in each for each in refusals), (cell, by_rank)
    if refusals:
        return
    want_y, want = oracle(cell)
    has_lora = cell.lora != "none"

    def near(name, found, wanted):
        error = (found - wanted).norm() / wanted.norm().clamp(min=1e-3)
        assert name != "y" or cell.compute != "fp8" or error > 0.01, f"not in fp8\n{cell}"
        assert error <= tolerance(cell), f"{name}: {float(error):.2e}\n{cell}"

    near("y", torch.cat([y for y, _ in by_rank]), want_y)
    for name in {"x": ["x"], "tokens": ["weight"]}.get(cell.frozen, ["x", "weight"]):
        if cell.held == "trained" and not (name == "x" and cell.frozen == "tokens"):
            near(name, torch.cat([grads[name] for _, grads in by_rank]), want[name])
    if cell.held != "trained" or cell.frozen == "experts":
        return
    trained = {key for key in want if isinstance(key, tuple) and ("lora" in key[1]) == has_lora}
    assert trained == {key for _, grads in by_rank for key in grads if isinstance(key, tuple)}
    for key in trained:
        parts = [grads[key] for _, grads in by_rank if key in grads]
        wanted = want[key]
        dims = [d for d in range(wanted.dim()) if parts[0].shape[d] != wanted.shape[d]]
        if dims:
            near(key, torch.cat(parts, dims[0]), wanted)
        else:  # copies on several ranks add up
            near(key, sum(parts), wanted)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "kernels", [False, pytest.param(True, marks=pytest.mark.interpreted)], ids=["torch", "triton"]
)
def test_each_cell_is_the_loop_or_refused(kernels, ranks):
    chosen = [cell for cell in cells(kernels) if (cell.place == "alone") == (ranks == 1)]
    results = run_ranks(_run_all, ranks, chosen, timeout=250)
    failures = []
    for number, cell in enumerate(chosen):
        try:
            check(cell, [rank[number] for rank in results])
        except AssertionError as error:
            failures.append(str(error)[:600])
    if failures:
        pytest.fail(f"{len(failures)} of {len(chosen)} cells\n" + "\n\n".join(failures[:12]))
