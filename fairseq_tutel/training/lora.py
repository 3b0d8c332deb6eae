"""Fine-tune a model by low-rank updates (LoRA) of its experts; FINETUNING.md shows how.

Adapters are saved alone, as the peft library names its files and their tensors, with the experts'
global numbers. So adapters that any number of ranks saved are loaded by any number of ranks.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed import full_tensor, shard_like, take_slice
from ..moe import MoELayer
from ..moe.experts import LoRAExperts
from ..moe.model import moe_layers, unwrap
from .state import all_ranks
from .state.full_state import gather_expert

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
_OPTIONS = ("r", "lora_alpha")  # in the header of the weights' file, too

logger = logging.getLogger(__name__)


def add_lora(
    model: nn.Module,
    rank: int = 8,
    alpha: float = 16.0,
    *,
    storage: str = "same",
    freeze: bool = True,
    seed: int | None = None,
) -> list[nn.Parameter]:
    """Give the experts of all MoE layers low-rank updates, and freeze the rest; not collective.

    Each weight W of each expert becomes ``W + alpha / rank * B @ A``, where B begins as zero. Call
    it after the model is built and loaded, and before an optimizer, a wrapper or
    :func:`~fairseq_tutel.training.prepare_data_parallel`.

    Args:
        model (nn.Module): a model with MoE layers, not wrapped. Their experts are of a built-in or
            registered network, or held in bf16 or int8 (``expert_storage``).
        rank (int): rows of A and columns of B (default 8).
        alpha (float): the update is multiplied by ``alpha / rank`` (default 16).
        storage (str): how the experts' frozen weights are held: ``same`` (default) as they are,
            ``bf16``, or ``int8`` with a scale per row.
        freeze (bool): freeze all other parameters of the model too (default True).
        seed (int): seed of A; an expert's values depend on it and on the expert's global number
            (default None: drawn from torch's global generator).

    Returns:
        list of nn.Parameter: A and B of this rank's experts, in fp32 (fp64 for fp64).

    Raises:
        ValueError: there is no MoE layer, or an expert is a module of your own or has updates.
    """
    for name, layer in _layers(model).items():
        if isinstance(layer.experts, LoRAExperts):
            raise ValueError(f"{name or 'the model'} has LoRA already: merge_lora(model) first")
        if hasattr(layer.experts, "base_layer"):
            raise ValueError(
                f"{name or 'the model'} has adapters of peft on its experts: use either add_lora "
                "or target_parameters"
            )
    banks = _make(model, rank, alpha, storage, seed)
    _put(model, banks, freeze)
    return [param for bank in banks.values() for param in bank.updates.values()]


def merge_lora(model: nn.Module) -> None:
    """Add the updates to the experts' weights, in place, and remove LoRA; not collective.

    The model's parameters stay frozen; experts in int8 become bf16.

    Args:
        model (nn.Module): a model with LoRA, not wrapped.
    """
    banks = _banks(model)
    for name, layer in _layers(model).items():
        layer.experts = banks[name].merged()


def save_lora(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Save the updates of the experts of all ranks in a folder. Collective.

    The folder has ``adapter_model.safetensors`` and ``adapter_config.json``, as the peft library
    writes them. A tensor is named ``base_model.model.LAYER.experts.3.fc1.lora_A.weight``, with the
    expert's global number. The folder also has all other trained parameters, and the buffers, such
    as load biases. Rank 0 writes; its CPU holds all that is saved. A process that is killed leaves
    the adapter that was there, or the new one.

    >>> import tempfile
    >>> from fairseq_tutel.moe import MoELayer
    >>> layer, folder = MoELayer(8, num_experts=4), tempfile.mkdtemp()
    >>> params = add_lora(layer)
    >>> save_lora(folder, layer)
    >>> load_lora(folder, MoELayer(8, num_experts=4))

    Args:
        path (str or Path): the folder; it is made.
        model (nn.Module): a model with LoRA, wrapped or not.
    """
    found, banks = gather_updates(model), _banks(model)
    for name, value in _others(model).items():
        if value.requires_grad or not isinstance(value, nn.Parameter):
            found[PREFIX + name] = full_tensor(value.detach()).to("cpu", copy=True)
    bank = next(iter(banks.values()))
    targets = sorted({single.split(".")[1] for single, *_ in _singles(bank)})
    write_adapter(path, found, bank.rank, bank.alpha, {"target_modules": targets})


def gather_updates(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return A, B and the trained weights of all experts, on rank 0's CPU. Collective.

    Names are those of the file; the result is {} on other ranks than 0.
    """
    found, banks = {}, _banks(model)
    for prefix, layer in _layers(model).items():
        for single, param, value in _singles(banks[prefix]):
            if not (_is_update(single) or param.requires_grad):
                continue
            parts = gather_expert(value, f"experts.{single}", layer.groups)
            slot, rest = single.split(".", 1)
            local = layer.groups.num_local_experts
            for number, part in enumerate(parts or ()):
                expert = number * local + int(slot)
                found[update_name(prefix, expert, rest)] = part.to("cpu", copy=True)
    return found


def write_adapter(
    path: str | os.PathLike[str],
    found: dict[str, torch.Tensor],
    rank: int,
    alpha: float,
    targets: dict[str, Any],
    **header: str,
) -> None:
    """Write rank 0's tensors as an adapter of peft with these targets. Collective."""
    folder = Path(path)
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "base_model_name_or_path": None,
        **targets,
    }

    def write() -> None:
        """Write both files. Renaming the weights is the commit: their header has rank and alpha."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        header.update({"format": "pt", **{key: json.dumps(config[key]) for key in _OPTIONS}})
        save_file(found, folder / f"{WEIGHTS}.new", metadata=header)
        text = json.dumps(config, indent=2) + "\n"
        (folder / f"{CONFIG}.new").write_text(text, encoding="utf-8")
        for name in (WEIGHTS, CONFIG):
            os.replace(folder / f"{name}.new", folder / name)

    all_ranks().run_on_first(f"saving {path}", write)


def load_lora(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Load updates that :func:`save_lora` saved on any number of ranks; not collective.

    A model without LoRA gets it, with the saved rank and alpha (:func:`add_lora`). Parameters that
    were trained beside the updates are loaded, and trained from then on.

    Args:
        path (str or Path): the folder.
        model (nn.Module): a model with as many experts, wrapped if it has LoRA.

    Raises:
        ValueError: the files are damaged, or of another model, rank or alpha.
    """
    from safetensors import safe_open

    with safe_open(Path(path) / WEIGHTS, "pt") as file:
        rank, alpha = _read_options(Path(path) / CONFIG, file.metadata() or {})
        put_updates(model, rank, alpha, file.keys(), file.get_tensor, path)


def put_updates(
    model: nn.Module,
    rank: int,
    alpha: float,
    names: Iterable[str],
    read: Callable[[str], torch.Tensor],
    path: str | os.PathLike[str],
) -> None:
    """Give a model the tensors of these names; ``path`` is what errors name."""
    has_lora = any(isinstance(layer.experts, LoRAExperts) for layer in _layers(model).values())
    banks = _banks(model) if has_lora else _make(model, rank, alpha)
    for bank in banks.values():
        if (rank, alpha) != (bank.rank, bank.alpha):
            own = f"rank={bank.rank} and alpha={bank.alpha:g}"
            raise ValueError(f"{path} has rank={rank} and alpha={alpha}, the model has {own}")
    values = _values(set(names), read, model, banks, path)
    if not has_lora:
        _put(model, banks)
    for owner, target, value in values:
        target.copy_(value)
        if isinstance(owner, nn.Parameter):
            owner.requires_grad_()


def _read_options(path: Path, header: dict[str, str]) -> tuple[int, float]:
    """Return rank and alpha from the header of the weights, or from an older ``path``."""
    own = {key: json.loads(header[key]) for key in _OPTIONS if key in header}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        given = {key: config[key] for key in _OPTIONS}
    except (OSError, ValueError, LookupError, TypeError) as error:
        if not own:
            raise ValueError(
                f"{path} has no r and lora_alpha ({error!r}): save the adapter again"
            ) from error
        given = None
    if own and given != own:
        logger.warning("%s differs from the weights beside it: %s is used", path, own)
    found = own or given or {}
    return found["r"], found["lora_alpha"]


def _values(
    names, read, model, banks, path
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the parameters and buffers that a file has, this rank's parts, and their values."""
    values, known = [], set()

    def add(name: str, owner: torch.Tensor, target: torch.Tensor, value: torch.Tensor) -> None:
        if value.shape != target.shape:
            shapes = f"{list(value.shape)}, the model's is {list(target.shape)}"
            raise ValueError(f"{path}: {name} is {shapes}")
        if target.dtype == torch.int8:
            raise ValueError(f"{path}: {name} was trained, and the model holds it in int8")
        values.append((owner, target, value))

    for prefix, layer in _layers(model).items():
        groups = layer.groups
        for single, param, target in _singles(banks[prefix]):
            slot, rest = single.split(".", 1)
            name = update_name(prefix, groups.local_experts[int(slot)], rest)
            known |= {update_name(prefix, expert, rest) for expert in range(groups.num_experts)}
            if name in names:
                whole = read(name)
                value = take_slice(whole, single, groups.slice_index, groups.num_slices)
                add(name, param, target, value)
            elif _is_update(single):
                raise ValueError(f"{path} lacks {name}")
    for own, target in _others(model).items():
        if (name := PREFIX + own) in names:
            add(name, target, target.detach(), shard_like(read(name), target))
            known.add(name)
    if names - known:
        raise ValueError(f"{path} has {min(names - known)}, which this model has not")
    return values


def _layers(model: nn.Module) -> dict[str, MoELayer]:
    layers = moe_layers(inside_peft(model))
    if not layers:
        raise ValueError(f"{type(model).__name__} has no MoE layer: LoRA here is for their experts")
    return layers


def _make(
    model: nn.Module, rank: int, alpha: float, storage: str = "same", seed: int | None = None
) -> dict[str, LoRAExperts]:
    """Return banks with updates by the names of their layers; the model stays as it is."""
    if isinstance(model, DistributedDataParallel):
        raise ValueError("the model is in DistributedDataParallel: add LoRA before you wrap it")
    return {
        name: LoRAExperts(
            layer.experts, rank, alpha, storage, None if seed is None else seed + number
        )
        for number, (name, layer) in enumerate(_layers(model).items())
    }


def _put(model: nn.Module, banks: dict[str, LoRAExperts], freeze: bool = True) -> None:
    """Put banks into the layers, and freeze all other parameters."""
    if freeze:
        model.requires_grad_(False)
    for name, layer in _layers(model).items():
        layer.experts = banks[name]


def _banks(model: nn.Module) -> dict[str, LoRAExperts]:
    """Return the banks of a model with LoRA by the names of their layers."""
    banks: dict[str, LoRAExperts] = {}
    for name, layer in _layers(model).items():
        if not isinstance(layer.experts, LoRAExperts):
            raise ValueError(f"{name or 'the model'} has no LoRA: call add_lora(model) first")
        banks[name] = layer.experts
    return banks


def inside_peft(model: nn.Module) -> nn.Module:
    """Return the model inside all wrappers, also that of peft."""
    model = unwrap(model)
    inside: Any = getattr(model, "get_base_model", None)
    return inside() if inside and hasattr(model, "peft_config") else model


def _singles(bank: LoRAExperts) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """Yield the tensors of single experts by name: the bank's parameter, and a view of it."""
    for name, singles in bank.single_names().items():
        param = getattr(bank, name)
        for single, part in zip(singles, param.detach(), strict=True):
            yield single, param, part


def _others(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of state dicts, without those of experts, by name."""
    model = inside_peft(model)
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}".lstrip(".")] = buffer
    experts = tuple(f"{prefix}.experts.".lstrip(".") for prefix in moe_layers(model))
    return {name: value for name, value in found.items() if not name.startswith(experts)}


def _is_update(single: str) -> bool:
    return single.endswith((".lora_A", ".lora_B"))


def update_name(prefix: str, expert: int, rest: str) -> str:
    """Return a tensor's name in the file: of layer ``prefix``, and ``fc1.lora_A``."""
    end = ".weight" if _is_update(rest) else ""
    return f"{PREFIX}{prefix}{'.' if prefix else ''}experts.{expert}.{rest}{end}"
