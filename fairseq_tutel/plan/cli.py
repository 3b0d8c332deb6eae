"""Command line of the planner."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from ..command_line import CommandLine
from ..config import EXPERT_PLACEMENTS
from ..shipped_configs import CONFIGS, config_directory, with_extension
from .choose import best_plan
from .compose import PLAN_KEYS, load_config
from .figure import draw
from .hardware import Hardware, load_hardware
from .planner import LADDER, ImpossiblePlan, check, ladder, make_plan
from .report import as_dict, describe, table
from .settings import DDP_BACKENDS, FORMULATIONS, Settings, read_settings

EPILOG = """\
key=value:
  gpus=N              ranks (default: the config's world size)
  hardware=NAME       a profile in CONFIG_DIR/hardware, or a shipped one (default: a100-80g)
  vocabulary=N        size of the dictionary where the config's data is not here
  exchange=NAME       algorithm of the all-to-all, as --moe-a2a
  overlap=N           chunks that overlap with the experts, as --moe-overlap-degree
  wire=FORMAT         numbers on the wire, as --moe-wire
  placement=WORD      of an expert that several GPUs hold, as --moe-expert-placement
  r=N                 slices of an expert that get each of its tokens, as --moe-parallelism-r
  formulation=dense   as fairseq's moe branch computes: masks of tokens x experts x capacity, and
                      attention with tables of scores (default: sparse, as this plugin does)
  ddp=fully_sharded   with formulation=dense: dense parameters spread over the GPUs
  anything else       an override of the config, as for fairseq-hydra-train: +model.x=1 adds
                      what the file does not state, ~task.x takes out what it does

examples:
  python -m fairseq_tutel.plan --config-name meta_1.1t gpus=512
  python -m fairseq_tutel.plan --config-name meta_1.1t --ladder --figure ladder.png
  python -m fairseq_tutel.plan --config-name meta_1.1t gpus=64 model.moe_expert_count=64 \\
      hardware=h200 dataset.batch_size=48
  python -m fairseq_tutel.plan --config-name meta_1.1t gpus=512 model.moe_expert_count=64 --best
  python -m fairseq_tutel.plan --config-name meta_4.1b gpus=8 hardware=a100-40g \\
      formulation=dense ddp=fully_sharded

The exit status is 1, with the reason on standard error, where a run cannot be.
"""


def parser() -> argparse.ArgumentParser:
    """Options of ``python -m fairseq_tutel.plan``."""
    options = CommandLine(
        prog="python -m fairseq_tutel.plan",
        description="Parameters, memory, traffic and predicted speed of a training run, on paper.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--config-name", required=True, help="a YAML file of the config folder")
    options.add_argument(
        "--config-dir",
        type=Path,
        help="folder of the configs (default: ./configs if the file is there, else the shipped "
        f"ones, {CONFIGS})",
    )
    options.add_argument(
        "--ladder",
        action="store_true",
        help="8 to 4096 GPUs, one expert per GPU unless model.moe_expert_count is given here",
    )
    options.add_argument(
        "--figure",
        type=Path,
        help="draw the ladder into this file; its folder is made if missing",
    )
    options.add_argument(
        "--best",
        action="store_true",
        help="also search exchange, overlap, placement and r for the shortest update, and say why",
    )
    options.add_argument("--json", action="store_true", help="print JSON instead of text")
    options.add_argument("override", nargs="*", metavar="key=value", help="see below")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the planner; returns the exit status."""
    options = parser().parse_args(arguments)
    logging.getLogger().setLevel(logging.WARNING)  # fairseq's import makes it talk
    try:
        return _run(options)
    except (ValueError, OSError) as error:  # the latter: --figure cannot be written
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    directory = options.config_dir or config_directory(with_extension(options.config_name))
    own, overrides = _split(options.override)
    hardware = _hardware(options.config_dir, own.get("hardware", "a100-80g"))
    config = load_config(directory, options.config_name, overrides)
    gpus, vocabulary = (_positive(own, key) for key in ("gpus", "vocabulary"))
    climb = options.ladder or options.figure is not None
    if climb:
        # every rung chooses its own experts; the config's number must divide none of them
        experts = _overridden_experts(overrides, config)
        config.model.moe_expert_count = experts or 0
        settings = read_settings(
            config, options.config_name, gpus=gpus or experts or LADDER[-1], vocabulary=vocabulary
        )
        settings = _with_own_keys(settings, own)
        plans = ladder(settings, hardware, experts=experts)
        best = [best_plan(plan) for plan in plans] if options.best else None
        if options.json:
            pairs = zip(plans, best or [None] * len(plans), strict=True)
            print(json.dumps([as_dict(*pair) for pair in pairs], indent=2))
        else:
            print(table(plans, best))
        if options.figure is not None:
            draw(plans, options.figure)
        return 0
    settings = read_settings(config, options.config_name, gpus=gpus, vocabulary=vocabulary)
    settings = _with_own_keys(settings, own)
    plan = make_plan(settings, hardware)
    best = best_plan(plan) if options.best else None
    print(json.dumps(as_dict(plan, best), indent=2) if options.json else describe(plan, best))
    try:
        check(best or plan)
    except ImpossiblePlan as reason:
        print(f"refused: {reason}", file=sys.stderr)
        return 1
    return 0


def _hardware(directory: Path | None, name: str) -> Hardware:
    """A profile of the folder that was named, else one of ./configs or a shipped one."""
    file = f"hardware/{with_extension(name)}"
    if directory is None or not (directory / file).is_file():
        directory = config_directory(file)
    return load_hardware(directory, name)


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The planner's own keys, and the overrides of the config."""
    own, overrides = {}, []
    for word in words:
        key, _, value = word.partition("=")
        if key in PLAN_KEYS:
            own[key] = value
        else:
            overrides.append(word)
    return own, overrides


def _with_own_keys(settings: Settings, own: dict[str, str]) -> Settings:
    """Settings with what the planner's own keys say of exchange and formulation."""
    if "exchange" in own:
        settings = settings.replace(model={"moe_a2a": own["exchange"]})
    if "overlap" in own:
        settings = settings.replace(model={"moe_overlap_degree": _positive(own, "overlap")})
    if "wire" in own:
        settings = settings.replace(model={"moe_wire": own["wire"]})
    placement = own.get("placement", settings.placement)
    if placement not in EXPERT_PLACEMENTS:
        raise ValueError(f"placement={placement}: choose from {', '.join(EXPERT_PLACEMENTS)}")
    r = settings.exchange.r
    if "r" in own:
        r = 0 if own["r"] == "0" else _positive(own, "r")
    settings = settings.with_flow(placement, r)
    _ = settings.exchange  # refuses what the layer would
    formulation = own.get("formulation", "sparse")
    if formulation not in FORMULATIONS:
        raise ValueError(f"formulation={formulation}: choose from {', '.join(FORMULATIONS)}")
    settings = settings.replace(formulation=formulation)
    if settings.is_dense_formulation and (placement, r) != ("replicated", 1):
        raise ValueError(
            f"formulation=dense has no placement={placement} r={r}: that is of this plugin's layer"
        )
    if "ddp" not in own:
        return settings
    if own["ddp"] not in DDP_BACKENDS:
        raise ValueError(f"ddp={own['ddp']}: choose from {', '.join(DDP_BACKENDS)}")
    settings = settings.replace(ddp_backend=own["ddp"])
    if own["ddp"] == "fully_sharded" and not settings.is_fully_sharded:
        raise ValueError(
            "ddp=fully_sharded needs formulation=dense: this plugin replicates dense parameters"
        )
    return settings


def _positive(own: dict[str, str], key: str) -> int | None:
    if key not in own:
        return None
    if not own[key].isdigit() or int(own[key]) < 1:
        raise ValueError(f"{key}={own[key]} is not a positive number")
    return int(own[key])


def _overridden_experts(overrides: Sequence[str], config) -> int | None:
    """model.moe_expert_count if it was given on the command line."""
    given = any(word.lstrip("+").startswith("model.moe_expert_count=") for word in overrides)
    return config.model.moe_expert_count if given else None
