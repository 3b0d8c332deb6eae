"""Files of safetensors, written tensor by tensor at any place: nothing is collected in memory.

The format is 8 bytes (the size of a header, little endian), the header in JSON (name -> dtype,
shape, first and last byte behind the header), and the numbers. All sizes are known before the first
number is, so that files are laid out first and filled in any order.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from pathlib import Path

import torch

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
INDEX = "model.safetensors.index.json"


class TensorFiles:
    """Files of at most ``max_bytes`` (or one tensor) each, and their index; a context manager.

    Args:
        folder: where they are written.
        shapes, dtypes: by name, of all tensors in their order.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        max_bytes: int = 5 * 10**9,
    ):
        sizes = {name: torch.Size(shapes[name]).numel() * dtypes[name].itemsize for name in shapes}
        shards: list[list[str]] = [[]]
        filled = 0
        for name, size in sizes.items():
            if shards[-1] and filled + size > max_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += size
        self._places = {}
        self._files = []
        self._dtypes = dtypes
        of_tensor = {}
        for number, names in enumerate(shards, start=1):
            single = len(shards) == 1
            label = "model" if single else f"model-{number:05}-of-{len(shards):05}"
            file = (folder / f"{label}.safetensors").open("wb")
            self._files.append(file)
            header, end = {"__metadata__": {"format": "pt"}}, 0
            for name in names:
                header[name] = {
                    "dtype": _NAMES[dtypes[name]],
                    "shape": list(shapes[name]),
                    "data_offsets": [end, end + sizes[name]],
                }
                end += sizes[name]
                of_tensor[name] = f"{label}.safetensors"
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)  # numbers begin at a multiple of 8 bytes
            file.write(len(text).to_bytes(8, "little") + text)
            begin = file.tell()
            file.truncate(begin + end)
            for name in names:
                self._places[name] = (file, begin + header[name]["data_offsets"][0])
        if len(shards) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": of_tensor}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Numbers of a tensor from element ``start`` on."""
        values = values.detach().cpu().contiguous()
        file, begin = self._places[name]
        file.seek(begin + start * self._dtypes[name].itemsize)
        data = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
        file.write(memoryview(data).cast("B"))

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *error) -> None:
        for file in self._files:
            file.close()
