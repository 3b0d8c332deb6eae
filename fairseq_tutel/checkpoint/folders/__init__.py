"""Folders of Hugging Face's transformers: the way to and from the names of a checkpoint.

- :mod:`.names`: place of each tensor of a checkpoint in a folder; ``export`` reads it, too.
- :mod:`.shapes`: tensors of a checkpoint by the ``config.json`` of a folder.
- :mod:`.options`: fairseq's options by the ``config.json`` of a folder.
- :mod:`.folder`: read a folder.
- :mod:`.importing`: write a set from a folder (``python -m fairseq_tutel.checkpoint import``).
"""

from .folder import SPECIAL
from .importing import import_folder
from .names import Place, is_no_weight, place_in_language_model, place_in_layer, place_in_nllb
from .options import ACTIVATIONS, SPECIAL_IDS
from .shapes import nllb_shapes

__all__ = [
    "ACTIVATIONS",
    "SPECIAL",
    "SPECIAL_IDS",
    "Place",
    "import_folder",
    "is_no_weight",
    "nllb_shapes",
    "place_in_language_model",
    "place_in_layer",
    "place_in_nllb",
]
