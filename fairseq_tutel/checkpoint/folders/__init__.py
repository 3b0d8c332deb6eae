"""Folders of Hugging Face's transformers: names and shapes of their tensors, and the import."""

from .folder import SPECIAL
from .importing import import_folder
from .options import ACTIVATIONS, SPECIAL_IDS
from .tensors import Place, is_no_weight, language_model_tensors, layer_tensors, nllb_tensors
