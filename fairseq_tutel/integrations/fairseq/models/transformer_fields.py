"""fairseq's options of an encoder-decoder transformer as one flat dataclass, named as its flags."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models.transformer import TransformerConfig

# defaults: the encoder's sizes
_AS_ENCODER = ("decoder_embed_dim", "decoder_ffn_embed_dim")
_AS_DECODER = ("decoder_input_dim", "decoder_output_dim")  # default: decoder_embed_dim
# stock parses these lists from texts: "0,2,4"
_LISTS = ("encoder_layers_to_keep", "decoder_layers_to_keep", "adaptive_softmax_cutoff")


def _fields(config: type, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """Yield (flat name, type, field) of a dataclass and of the dataclasses in it."""
    for field in dataclasses.fields(config):
        name, kind, default = prefix + field.name, field.type, field.default
        metadata = dict(field.metadata)
        if field.name.startswith("_"):
            continue  # fairseq's own, in each dataclass
        if dataclasses.is_dataclass(kind):
            yield from _fields(kind, f"{name}_")
            continue
        if name in _AS_ENCODER or name in _AS_DECODER:
            kind, default = Optional[int], None
        elif name in _LISTS:
            kind = Optional[str]
        elif name == "activation_dropout" and not hasattr(config, "relu_dropout"):
            metadata["argparse_alias"] = "--relu-dropout"  # NLLB passes it, and a fork has none
        yield name, kind, dataclasses.field(default=default, metadata=metadata)


FlatTransformerConfig = dataclasses.make_dataclass(
    "FlatTransformerConfig", _fields(TransformerConfig), bases=(FairseqDataclass,)
)


def fill_sizes(args: Any) -> None:
    """Derive sizes from others, as fairseq's functions for its arches do."""
    for name in _AS_ENCODER:
        if getattr(args, name) is None:
            setattr(args, name, getattr(args, name.replace("decoder", "encoder", 1)))
    if args.share_all_embeddings:
        args.share_decoder_input_output_embed = True
    fill_decoder_sizes(args)


def fill_decoder_sizes(args: Any) -> None:
    """Derive sizes from others; a language model has these alone."""
    for name in _AS_DECODER:
        if getattr(args, name) is None:
            setattr(args, name, args.decoder_embed_dim)
    if args.offload_activations:
        args.checkpoint_activations = True
