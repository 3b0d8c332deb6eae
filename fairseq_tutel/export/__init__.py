"""Models with experts for other programs: transformers, and C++ without Python (language models).

Exports evaluate without a capacity, as fairseq generates. README.md shows the commands.
"""

from .aot import export_aot, export_layer, layer_twin
from .description import LayerConfig, ModelConfig, describe_layer
from .errors import ExportError
from .huggingface import export_huggingface
from .source import ModelSource
from .tokenizer import TokenizerFiles

__all__ = [
    "ExportError",
    "LayerConfig",
    "ModelConfig",
    "ModelSource",
    "TokenizerFiles",
    "describe_layer",
    "export_aot",
    "export_huggingface",
    "export_layer",
    "layer_twin",
]
