"""Folders of Hugging Face's transformers: names and shapes of their tensors, and the import."""

from .folder import SPECIAL
from .importing import import_folder
from .names import Place, is_no_weight, place_in_language_model, place_in_layer, place_in_nllb
from .options import ACTIVATIONS, SPECIAL_IDS
from .shapes import nllb_shapes
