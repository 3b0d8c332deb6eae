"""``--arch NAME_moe``: any architecture of fairseq's registry, with experts in its layers.

    --arch s2t_transformer_s_moe --moe-expert-count 8 --moe-freq 2

A row of fairseq's registry gets a second row with ``_moe`` at the end of its name. The second row
has the options and defaults of the first, and :class:`AnyMoEOptions`. Its ``build_model`` builds
the dense model, and then replaces feed-forward blocks by MoE layers. So the model is an instance of
the dense class, and tasks and criterions that ask for this class take it.

A stack is a list of layers, such as ``encoder.layers``. Layer i (from 1) of each stack gets experts
if i is a multiple of ``--moe-freq``; in a conformer both of its half-step blocks do.
``--moe-blocks REGEX`` chooses blocks by their names. ``--moe-freq 0`` is the dense model.

Classes with a dataclass get one of their own, and work with Hydra. The others read a namespace.
Names of ``transformer`` become architectures of ``transformer_moe``, which has more options.

Names that are registered when the user dir is imported get such a row, also those of other user
dirs that were imported before.
"""

import dataclasses
import functools
import re
from argparse import SUPPRESS, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

from fairseq import models
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import BaseFairseqModel
from omegaconf import OmegaConf
from torch import nn

from ....config.options import as_flag, check_needs, option
from ....moe import layers_with_ffn
from ....moe.model import moe_layers
from ..criterions import GateLoss
from ..criterions.moe_criterion import GateLossOptions, gate_loss_weight
from ..options.bundles import expand
from ..options.fields import with_registered
from ..options.options import MoEOptions, run_options
from .architectures import ARCHITECTURES, use_schema
from .moe_stack import LayerFactory, with_lora, world_size
from .stock_layers import prepare_layers
from .tuned_passes import tune_passes, tuner_of

ENDING = "_moe"
_IN_LIST = re.compile(r"(.*)\.(\d+)(?:\..*)?")  # stack, number of the layer
_OF_CHECKPOINTS = ("w2v_path",)  # options by which a model begins with a trained one
# options that choose layers, or that the trainer reads; the others make layers
_OF_RUN = (
    *("moe_freq", "moe_blocks", "moe_gate_loss_wt", "moe_gate_loss_combine_method"),
    *("moe_normalize_expert_grad", "moe_load_log_interval", "num_workers_valid"),
    *("moe_trace", "moe_trace_interval"),
)
# options in which all layers agree, as one trainer serves them
_OF_ALL_LAYERS = {"num_experts": "--moe-expert-count", "load_bias": "--moe-load-bias"}


@dataclass
class AnyMoEOptions(MoEOptions, FairseqDataclass):
    """Options of ``NAME_moe`` beside those of ``NAME``."""

    moe_blocks: Optional[str] = option(
        None,
        "regular expression: replace the blocks whose names match, and ignore --moe-freq "
        "(python -m fairseq_tutel architectures NAME lists names)",
        group="size",
    )
    moe_copy_blocks: bool = option(
        False,
        "start every expert as the block that it replaces (on if --w2v-path gives trained ones)",
        group="size",
    )
    moe_gate_loss_wt: Optional[float] = gate_loss_weight(GateLoss.default_weight)
    moe_gate_loss_combine_method: ChoiceEnum(["sum", "average"]) = option(
        "average", "how the losses of the MoE layers are combined", group="balance"
    )


class WithExperts:
    """Mixin of the registered classes, named before the dense class."""

    dense: Any  # the registered class of NAME

    @classmethod
    def build_model(cls, args, task):
        """Build the dense model, with experts; collective if torch.distributed is initialised."""
        if getattr(cls, "__dataclass", None) is None:
            if not hasattr(args, "arch"):
                raise ValueError(
                    f"{cls.dense.__name__} takes its options from a command line, not from Hydra: "
                    f"fairseq-train DATA --user-dir fairseq_tutel --arch {args._name} ..."
                )
            if OmegaConf.is_config(args):  # a checkpoint's; stock gives these classes a namespace
                args = Namespace(**OmegaConf.to_container(args, enum_to_str=True))
            for field in dataclasses.fields(with_registered(AnyMoEOptions)):
                if not hasattr(args, field.name):  # a checkpoint older than the option
                    setattr(args, field.name, field.default)
        return put_experts(cls.dense.build_model(args, task), args)

    @classmethod
    def add_args(cls, parser):
        """Add the options of the dense class, and those of experts."""
        if getattr(cls, "__dataclass", None) is not None:
            BaseFairseqModel.add_args.__func__(cls, parser)
        else:
            cls.dense.add_args(parser)
            gen_parser_from_dataclass(parser, with_registered(AnyMoEOptions)())
            for action in parser._actions:
                if action.dest in GateLossOptions.__dataclass_fields__:
                    action.default = SUPPRESS  # a criterion with this option has its own default


def register_all() -> None:
    """Give every architecture of fairseq's registry a row with experts."""
    ours = {row.model for row in ARCHITECTURES.values()}
    for arch, dense in list(models.ARCH_MODEL_REGISTRY.items()):
        name = arch + ENDING
        if issubclass(dense, WithExperts) and arch in models.MODEL_DATACLASS_REGISTRY:
            use_schema(arch, dense, _schema_of(dense.dense))  # routers may be new
        if name in models.ARCH_MODEL_REGISTRY or dense in ours or issubclass(dense, WithExperts):
            continue
        model_name = models.ARCH_MODEL_NAME_REGISTRY[arch]
        row = ARCHITECTURES.get(model_name + ENDING)
        defaults = models.ARCH_CONFIG_REGISTRY[arch]
        if row is not None:
            both = functools.partial(_both, defaults, models.ARCH_CONFIG_REGISTRY[row.name])
            models.register_model_architecture(row.name, name)(both)
            continue
        if model_name + ENDING not in models.MODEL_REGISTRY:
            _register_class(model_name + ENDING, dense)
        if name not in models.ARCH_MODEL_REGISTRY:  # that of a dataclass is registered by now
            models.register_model_architecture(model_name + ENDING, name)(defaults)
        models.ARCH_CONFIG_REGISTRY[name] = functools.partial(_both, defaults, check_options)


def _register_class(name: str, dense: Any) -> None:
    sparse = type(f"{dense.__name__}WithExperts", (WithExperts, dense), {"dense": dense})
    models.register_model(name, dataclass=_schema_of(dense))(sparse)


def _schema_of(dense: Any) -> Any:
    """Return the dataclass of a class with experts; None if the dense class has none."""
    schema = getattr(dense, "__dataclass", None)
    return None if schema is None else _joined(with_registered(AnyMoEOptions), schema)


@functools.cache
def _joined(options: type, schema: type) -> type:
    name = f"{schema.__name__}WithExperts"
    return dataclasses.make_dataclass(name, [], bases=(options, schema))


def _both(defaults: Callable, rules: Callable, args: Any) -> None:
    """Set an architecture's defaults; check the options of a command line."""
    defaults(args)
    if isinstance(args, Namespace) and hasattr(args, "arch"):
        rules(args)


def check_options(args: Namespace) -> None:
    """End the program if parsed options of experts contradict each other."""
    from ..options.command_line import without_tpu

    without_tpu(args)
    schema = with_registered(AnyMoEOptions)
    defaults = {field.name: field.default for field in dataclasses.fields(schema)}
    try:
        expand(args, schema)
        run_options(Namespace(**{**defaults, **vars(args)}), AnyMoEOptions, any_model=True)
        check_needs(args, AnyMoEOptions, as_flag)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def put_experts(model: Any, args: Any) -> Any:
    """Replace blocks of a dense model as its options say, and return the model. Collective."""
    if not (args.moe_freq or args.moe_blocks):
        return model
    run = run_options(args, AnyMoEOptions, world_size(args), any_model=True)
    names = args.moe_blocks or blocks_of(model, args.moe_freq)
    if not names and moe_layers(model):  # a part of it comes from a checkpoint, with its experts
        _refuse_without_effect(args)
        return adopt(model)
    factory = LayerFactory(run)
    trained = any(getattr(args, name, None) for name in _OF_CHECKPOINTS)
    factory.replace(model, names, copy_weights=bool(args.moe_copy_blocks or trained))
    prepare_layers(model)
    tune_passes(model, run)
    return adopt(with_lora(model, run))


def _refuse_without_effect(args: Any) -> None:
    """Raise ValueError for options of layers that a checkpoint has made with other options."""
    stored = getattr(getattr(args, "w2v_args", None), "model", None)
    if stored is None:
        return
    given, made = [], []
    for field in dataclasses.fields(with_registered(AnyMoEOptions)):
        name, default = field.name, field.default
        mine, theirs = getattr(args, name, default), getattr(stored, name, default)
        counts = name not in _OF_RUN and not name.startswith("_")
        if counts and str(mine) not in (str(default), str(theirs)):
            given.append(as_flag(name, mine))
            made.append(str(theirs))
    if given:
        raise ValueError(
            f"{' '.join(given)}: all experts come from {args.w2v_path}, which was trained with "
            f"{' and '.join(made)}: leave the option out"
        )


def blocks_of(model: nn.Module, freq: int) -> list[str]:
    """Return the names of every ``freq``-th layer of each stack that is dense.

    Raise ValueError if the model has no layer with a known feed-forward block, or none is chosen.
    """
    stacks: dict[str, dict[str, int]] = {}
    for name in layers_with_ffn(model):
        stack, number = stack_of(name)
        stacks.setdefault(stack, {})[name] = number
    begun = {stack_of(name)[0] for name in moe_layers(model)}
    chosen = [
        name
        for stack, layers in stacks.items()
        if stack not in begun
        for name, number in layers.items()
        if (number + 1) % freq == 0
    ]
    if chosen or begun:
        return chosen
    if not stacks:
        raise ValueError(
            f"{type(model).__name__} has no layer whose feed-forward block is known (fc1, "
            "activation and fc2 of a transformer, w_1 and w_2 of a conformer): give --moe-blocks "
            "REGEX with the names of modules that map [..., M] to [..., M], or train it dense"
        )
    sizes = ", ".join(f"{stack} has {len(layers)}" for stack, layers in stacks.items())
    raise ValueError(
        f"--moe-freq {freq} makes no MoE layer ({sizes}): give a smaller number, or 0 for a dense "
        "model"
    )


def stack_of(name: str) -> tuple[str, int]:
    """Return the list that holds a layer, and the layer's number; without a list its name and 0."""
    place = _IN_LIST.fullmatch(name)
    return (place[1], int(place[2])) if place else (name, 0)


def adopt(model: Any) -> Any:
    """Give a model the attributes by which trainer, criterions and checkpoints find its layers."""
    layers = moe_layers(model)
    for name, flag in _OF_ALL_LAYERS.items():
        found = dict.fromkeys(str(getattr(layer.config, name)) for layer in layers.values())
        if len(found) > 1:
            raise ValueError(
                f"layers with {flag} {' and '.join(found)} in one model: give the value with which "
                "its trained part was made"
            )
    model.moe_layers, model.moe_groups = layers, next(iter(layers.values())).groups
    model.moe_reports_are_collected, model.exchange_tuner = True, tuner_of(model)
    return model


def adopt_inner(model: nn.Module) -> None:
    """Adopt a model around one with experts, such as a recogniser around a wav2vec model."""
    if getattr(model, "moe_layers", None) is None and any(
        getattr(module, "moe_reports_are_collected", False) for module in model.modules()
    ):
        adopt(model)
