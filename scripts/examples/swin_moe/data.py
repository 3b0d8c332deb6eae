"""Images as tensors: a folder of class folders, or scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif"}


class Images:
    """Images of one split, in memory or in files.

    Attributes:
        labels: [N], classes.
        names: of the classes.
    """

    def __init__(self, items: Tensor | list[Path], labels: Tensor, names: list[str], size: int):
        self.items, self.labels, self.names, self.size = items, labels, names, size

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor, channels: int, augment: bool) -> tuple[Tensor, Tensor]:
        """([n, channels, size, size] of zero mean and unit variance at most, labels [n])."""
        if isinstance(self.items, Tensor):
            x = self.items[indices]
        else:
            x = torch.stack([_read(self.items[i], self.size, channels) for i in indices.tolist()])
        x = x.expand(-1, channels, -1, -1)
        if augment:
            x = _shift(x, self.size // 16)
        return x, self.labels[indices]


def _read(path: Path, size: int, channels: int) -> Tensor:
    import numpy
    from PIL import Image

    with Image.open(path) as image:
        image = image.convert("L" if channels == 1 else "RGB").resize((size, size))
        values = torch.from_numpy(numpy.array(image)).float().div(127.5).sub(1)
    return values[None] if channels == 1 else values.permute(2, 0, 1)


def _shift(x: Tensor, most: int) -> Tensor:
    """Each image moved by up to so many pixels; what comes in is the background of its corner."""
    count, _, height, width = x.shape
    by = torch.randint(-most, most + 1, (2, count, 1))
    rows = (torch.arange(height) + by[0]).clamp(0, height - 1)
    columns = (torch.arange(width) + by[1]).clamp(0, width - 1)
    which = torch.arange(count)[:, None, None]
    return x.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


def load(name: str, size: int, held_out: float = 0.2) -> tuple[Images, Images]:
    """(training, held-out) images of ``digits``, or of a folder with train/ and val/.

    Raises:
        ValueError: no such folder, or no images in it.
    """
    if name == "digits":
        return _digits(size, held_out)
    root = Path(name)
    if not (root / "train").is_dir() or not (root / "val").is_dir():
        raise ValueError(f"--data {name}: neither digits nor a folder with train/ and val/")
    names = sorted(path.name for path in (root / "train").iterdir() if path.is_dir())
    return _folder(root / "train", names, size), _folder(root / "val", names, size)


def _folder(root: Path, names: list[str], size: int) -> Images:
    found = [
        (path, label)
        for label, name in enumerate(names)
        for path in sorted((root / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise ValueError(
            f"{root}: no images in {names or 'it; a folder for each class is expected'}"
        )
    paths, labels = zip(*found, strict=True)
    return Images(list(paths), torch.tensor(labels), names, size)


def _digits(size: int, held_out: float) -> tuple[Images, Images]:
    """1,797 handwritten digits of 8 x 8 pixels, enlarged; every fifth is held out."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = torch.from_numpy(raw.images).float()[:, None] / 8 - 1
    x = torch.nn.functional.interpolate(x, size=(size, size), mode="bilinear")
    labels, names = torch.from_numpy(raw.target), [str(digit) for digit in range(10)]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    parts = order.split([len(x) - int(held_out * len(x)), int(held_out * len(x))])
    train, test = (Images(x[part], labels[part], names, size) for part in parts)
    return train, test
