"""One MoE layer of other libraries, imported from where they are built, for bench_peers.py.

Nothing of theirs is in this repository. Each function returns the layer as a function of tokens
(T, M), with the parameters that get gradients; layers draw weights of their own.
"""

import importlib
import importlib.machinery
import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from presets import LayerShape
from torch import Tensor, nn

# tokens of one sequence, where a layer takes batches
_SEQUENCE = 128
# of a dense mask, beyond which a layer with such masks is not run: seconds, and 1 GiB each
_MASK_NUMEL = 2**28
_META = "meta_moe"  # packages that Meta's folder is imported as: with Tutel's dispatcher or without


class Peer(NamedTuple):
    """Someone's layer.

    Attributes:
        run: tokens (T, M) -> output, or output and balance loss.
        module: holds the parameters.
    """

    run: Callable[[Tensor], tuple[Tensor, ...]]
    module: nn.Module


@contextmanager
def importable(folder: Path | None, **stand_ins: types.ModuleType | None) -> Iterator[None]:
    """Within, modules of the folder can be imported, and others have stand-ins (None: absent)."""
    saved = {name: sys.modules.get(name) for name in stand_ins}
    if folder is not None:
        sys.path.insert(0, str(folder))
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in saved.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def tutel_layer(folder: Path, shape: LayerShape, capacity_factor: float) -> Peer:
    """Tutel's layer; a factor of 0 means as many rows as the fullest expert needs."""
    with importable(folder):
        moe = importlib.import_module("tutel.moe")
    gate = {"type": "top", "k": shape.top_k, "capacity_factor": capacity_factor, "fp32_gate": True}
    experts = {
        "type": "ffn",
        "num_experts_per_device": shape.experts,
        "hidden_size_per_expert": shape.hidden_dim,
        "activation_fn": nn.functional.gelu,
    }
    layer = moe.moe_layer(gate_type=gate, experts=experts, model_dim=shape.model_dim)

    def run(x):
        y = layer(x[None])
        return y[0], y.l_aux

    return Peer(run, layer)


def gated_width(shape: LayerShape) -> int:
    """F of a gated network with as many FLOPs: 2/3 of the shape's, as grouped products want it."""
    return 8 * round(shape.hidden_dim / 12)


def mixtral_block(folder: Path, shape: LayerShape) -> Peer:
    """Hugging Face's Mixtral block: gated experts without biases, no capacity, no balance loss."""
    audio = types.ModuleType("torchaudio")  # where one is installed that does not fit torch
    audio.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    with importable(folder, torchaudio=audio):
        mixtral = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(
        hidden_size=shape.model_dim,
        intermediate_size=gated_width(shape),
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = "grouped_mm"
    block = mixtral.MixtralSparseMoeBlock(config)
    for param in block.parameters():
        nn.init.normal_(param, std=0.02)

    def run(x):
        y = block(x[None])
        return ((y[0] if isinstance(y, tuple) else y)[0],)

    return Peer(run, block)


class _FFN(nn.Sequential):
    def __init__(self, model_dim: int, hidden_dim: int):
        fc1, fc2 = nn.Linear(model_dim, hidden_dim), nn.Linear(hidden_dim, model_dim)
        super().__init__(fc1, nn.GELU(), fc2)


def meta_layer(
    folder: Path, shape: LayerShape, tutel: Path | None, eval_fraction: float | None = None
) -> Peer:
    """The layer of fairseq's branch moe, with Tutel's dispatcher or with its own masks.

    Args:
        folder: ``fairseq/modules/moe`` of the branch; only its layer and gates are imported.
        eval_fraction: for evaluation: rows of an expert, as a fraction of the tokens, its
            ``moe_eval_capacity_token_fraction`` (0.25 by default; not above 0: as in training).

    Raises:
        ValueError: it has gates of one and of two experts per token only.
    """
    if shape.top_k > 2:
        raise ValueError(f"it has no gate of {shape.top_k} experts per token")
    fraction = 0.25 if eval_fraction is None else eval_fraction
    capacity = shape.capacity
    if eval_fraction is not None and fraction > 0:
        capacity = math.ceil(fraction * shape.tokens)
    mask = shape.tokens * shape.experts * capacity
    if not tutel and mask > _MASK_NUMEL:
        raise ValueError(f"each of its masks has {mask:,} numbers")
    name = f"{_META}_{'tutel' if tutel else 'einsum'}"
    fairseq, utils = types.ModuleType("fairseq"), types.ModuleType("fairseq.distributed_utils")
    fairseq.distributed_utils = utils
    utils.get_moe_group = utils.get_all2all_group = lambda experts: None
    utils.get_world_size = lambda group: 1
    stand_ins = {"fairseq": fairseq, "fairseq.distributed_utils": utils}
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules.setdefault(name, package)
    if not tutel:
        stand_ins["tutel"] = None  # the branch takes Tutel's dispatcher wherever it finds it
    with importable(tutel, **stand_ins):
        moe_layer = importlib.import_module(f"{name}.moe_layer")
        top1, top2 = (importlib.import_module(f"{name}.top{k}gate") for k in (1, 2))
    if shape.top_k == 1:
        gate = top1.Top1Gate(shape.model_dim, shape.experts, True, fraction)
    else:
        gate = top2.Top2Gate(shape.model_dim, shape.experts, True, "all", False, fraction, False)
    batch = 1 if eval_fraction is not None else shape.tokens // _SEQUENCE
    args = types.SimpleNamespace(moe_expert_count=shape.experts, dummy_a2a=True, batch_size=batch)
    args.batch_size_valid = batch
    experts = nn.ModuleList(_FFN(shape.model_dim, shape.hidden_dim) for _ in range(shape.experts))
    layer = moe_layer.MOELayer(gate, experts, args)
    if eval_fraction is not None:
        layer.prepare_for_inference_()  # it fills up no batch
        layer.eval()

    def run(x):
        y, loss = layer(x.view(batch, -1, shape.model_dim))
        return y.view(x.shape), loss

    return Peer(run, layer)


def random_gradients(outputs: tuple[Tensor, ...], dy: Tensor) -> list[Tensor]:
    """Of the output, and of the balance loss where there is one."""
    return [dy, *(torch.full_like(loss, 0.01) for loss in outputs[1:])]
