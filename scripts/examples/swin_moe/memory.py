"""Memory that a step of training takes with and without --recompute.

    python scripts/examples/swin_moe/memory.py --preset small --batch-size 16

One forward and backward pass of random images on one rank, fp32, on a CPU: the bytes of all tensors
that are alive at once, at most, besides weights and images. What an operator uses and frees inside
itself is not seen.
"""

from __future__ import annotations

import argparse
import weakref
from dataclasses import replace

import torch
from model import PRESETS, SwinConfig, SwinMoE
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fairseq_tutel import training


class LiveBytes(TorchDispatchMode):
    """Within, ``live`` are the bytes of tensors made within that still exist, ``peak`` the most."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def ignore(self, tensor: torch.Tensor) -> None:
        """One that was there before."""
        self._known.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self._see(value.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def measure(config: SwinConfig, batch_size: int) -> tuple[int, int, int]:
    """Bytes of a step: (at most, after the forward pass, after the step: gradients)."""
    torch.manual_seed(0)
    model = SwinMoE(config)
    images = torch.randn(batch_size, config.channels, config.image, config.image)
    labels = torch.randint(config.classes, (batch_size,))
    live = LiveBytes()
    for tensor in (images, labels, *model.parameters(), *model.buffers()):
        live.ignore(tensor)
    with live:
        with training.collect_aux(model) as aux:
            loss = nn.functional.cross_entropy(model(images), labels)
        loss = loss + 0.01 * aux.loss
        kept = live.live
        loss.backward()
        del loss, aux
    return live.peak, kept, live.live


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", default="small", choices=PRESETS, help="sizes of the model")
    parser.add_argument("--batch-size", type=int, default=16, help="images")
    options = parser.parse_args()
    config, peaks = PRESETS[options.preset], []
    for recompute in (False, True):
        changed = replace(config, recompute=recompute, drop_path=0.0)
        peak, kept, gradients = measure(changed, options.batch_size)
        print(
            f"{'--recompute' if recompute else 'all kept'}: {peak} bytes at most, {kept} after the "
            f"forward pass, {gradients} of gradients"
        )
        peaks.append(peak)
    saved = 100 * (1 - peaks[1] / peaks[0])
    print(f"{saved:.0f} % less, {sum(config.depths)} blocks, {options.batch_size} images")


if __name__ == "__main__":
    main()
