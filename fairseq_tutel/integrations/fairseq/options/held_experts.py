"""How a model holds its experts: options of low-rank updates (LoRA), and of storage."""

from dataclasses import dataclass
from typing import Any

from ....config.options import above, as_flag, at_least, option

EXPERT_DTYPES = ("same", "bf16", "int8")


@dataclass
class LoRAOptions:
    """Base of a model's dataclass."""

    moe_lora_rank: int = option(
        0,
        "> 0: train only low-rank updates of this rank of the experts' weights (LoRA), as with "
        "--finetune-from-model",
        at_least(0),
        group="size",
    )
    moe_lora_alpha: float = option(
        16.0,
        "with --moe-lora-rank: factor of the updates, divided by the rank",
        above(0),
        group="size",
    )


def expert_storage(args: Any) -> str:
    """Return ``expert_storage`` of the layers; ValueError if options contradict each other."""
    dtype = str(getattr(args, "moe_expert_dtype", "same"))
    mapped = getattr(args, "moe_map_experts", False)
    if dtype != "same" and mapped:
        raise ValueError(f"--moe-expert-dtype {dtype} or --moe-map-experts: give one of them")
    if mapped and getattr(args, "moe_lora_rank", 0):
        merge = "python -m fairseq_tutel.checkpoint merge-lora"
        raise ValueError(f"--moe-map-experts reads no set with LoRA: merge it first ({merge})")
    storage = "mapped" if mapped else "stacked" if dtype == "same" else dtype
    if storage != "stacked" and str(args.moe_expert_placement) == "sliced":
        raise ValueError(f"{storage} experts are whole: drop --moe-expert-placement sliced")
    return storage


def refuse_in_training(args: Any) -> None:
    """Raise ValueError for an option that is for evaluation only."""
    if expert_storage(args) != "stacked" and not getattr(args, "moe_lora_rank", 0):
        dtype = as_flag("moe_expert_dtype", args.moe_expert_dtype)
        given = "--moe-map-experts" if args.moe_map_experts else dtype
        raise ValueError(f"{given} is for evaluation: train without it (INFERENCE.md)")
