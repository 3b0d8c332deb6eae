"""How a model holds its experts: the storage that its options ask for."""

from typing import Any

from ....config.options import as_flag

EXPERT_DTYPES = ("same", "bf16", "int8")


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
        raise ValueError(f"{given} is for evaluation: train without it (MEMORY.md)")
