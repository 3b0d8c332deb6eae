"""Images as tensors: a folder of class folders, scikit-learn's digits, or glyphs of fonts."""

from __future__ import annotations

import functools
import random
import re
import string
from pathlib import Path

import torch
from torch import Tensor

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif"}
CHARACTERS = string.ascii_letters + string.digits
# Families of fonts that matplotlib brings; its other files lack letters or draw them as symbols.
FAMILIES = {
    "DejaVu": r"DejaVu(Sans|SansMono|Serif)(-\w+)?\.ttf",
    "STIX": r"STIXGeneral\w*\.ttf",
    "Computer Modern": r"cm(b|r|ss|ti|tt)10\.ttf",
}
HELD_OUT = "Computer Modern"


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
    """(training, held-out) images of ``digits``, ``glyphs``, or a folder with train/ and val/.

    ``glyphs:CHARACTERS`` are those of these letters and digits only.

    Raises:
        ValueError: no such folder or glyphs, or no images in it.
    """
    if name == "digits":
        return _digits(size, held_out)
    kind, _, characters = name.partition(":")
    if kind == "glyphs":
        if not set(characters) <= set(CHARACTERS):
            raise ValueError(f"--data {name}: after the colon, letters and digits of ASCII")
        return _glyphs(size, characters or CHARACTERS)
    root = Path(name)
    if not (root / "train").is_dir() or not (root / "val").is_dir():
        raise ValueError(
            f"--data {name}: neither digits, glyphs, nor a folder with train/ and val/"
        )
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


@functools.cache  # drawing takes seconds
def _glyphs(size: int, characters: str = CHARACTERS, per_font: int = 6) -> tuple[Images, Images]:
    """Letters and digits of the fonts that matplotlib brings; one family is held out.

    Fonts of a family look alike: a split by file would hold out what was seen.
    """
    import matplotlib

    found = sorted(Path(matplotlib.get_data_path(), "fonts", "ttf").iterdir())
    draw, splits = random.Random(0), ([], [])
    for family, pattern in FAMILIES.items():
        for path in (path for path in found if re.fullmatch(pattern, path.name)):
            for label, character in enumerate(characters):
                for _ in range(per_font):
                    values = _glyph(path, character, size, draw)
                    splits[family == HELD_OUT].append((values, label))
    parts = []
    for split in splits:
        x = torch.stack([values for values, _ in split]).float().div(127.5).sub(1)
        labels = torch.tensor([label for _, label in split])
        parts.append(Images(x, labels, list(characters), size))
    return parts[0], parts[1]


def _glyph(path: Path, character: str, size: int, draw: random.Random) -> Tensor:
    """uint8 [1, size, size]: a character of random size, place and slant."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(str(path), int(size * draw.uniform(0.6, 0.85)))
    canvas = Image.new("L", (size, size), 0)
    left, top, right, bottom = font.getbbox(character)
    x = (size - right - left) / 2 + draw.uniform(-2, 2)
    y = (size - bottom - top) / 2 + draw.uniform(-2, 2)
    ImageDraw.Draw(canvas).text((x, y), character, 255, font)
    canvas = canvas.rotate(draw.uniform(-12, 12))
    return torch.frombuffer(bytearray(canvas.tobytes()), dtype=torch.uint8).view(1, size, size)
