"""Models with experts for other programs: transformers, and C++ without Python.

    python -m fairseq_tutel.export huggingface CHECKPOINT FOLDER
    python -m fairseq_tutel.export aot CHECKPOINT model.pt2

``export_huggingface`` writes a folder that transformers loads; ``export_aot`` and ``export_layer``
an AOTInductor package of a language model, or of one layer, that a C++ program runs. All of them
evaluate without a capacity, as fairseq generates. What has no place in them is refused by name,
with an :class:`ExportError`. The README beside this file shows both from end to end.
"""

from .aot import export_aot, export_layer, layer_twin
from .description import ModelDescription, MoEDescription, describe_moe
from .errors import ExportError
from .huggingface import export_huggingface
from .source import ModelSource
from .tokenizer import TokenizerFiles

__all__ = [
    "ExportError",
    "ModelDescription",
    "ModelSource",
    "MoEDescription",
    "TokenizerFiles",
    "describe_moe",
    "export_aot",
    "export_huggingface",
    "export_layer",
    "layer_twin",
]
