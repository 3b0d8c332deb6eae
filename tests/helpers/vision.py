"""timm, also where torchvision is of another index than torch."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

_KEPT = []  # a library's operators are gone when it is collected


def import_timm():
    """timm; without it the test is skipped.

    timm imports torchvision, and that one gives shapes to operators of its compiled library. The
    library of a torchvision with CUDA does not load beside a torch for CPUs, and the import ends
    with ``operator torchvision::nms does not exist``. No model of timm calls these operators: their
    names are enough. A user installs the torchvision that belongs to the torch instead.
    """
    folder = str(Path(sys.prefix) / "vision")  # scripts/setup_env.sh
    sys.path.append(folder)
    try:
        return _import_timm()
    finally:
        # ranks of other tests inherit the path, where transformers would find this torchvision
        sys.path.remove(folder)


def _import_timm():
    for module in ("torchvision", "timm"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"no {module}")
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
    return importlib.import_module("timm")
