"""Write the page of models: ``python tests/integrations/transformers/models_page.py``.

With ``--verdicts`` only count the models of the installed version by verdict.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers

from fairseq_tutel.integrations.transformers import replace_moe
from fairseq_tutel.integrations.transformers.experts import KeptExperts
from fairseq_tutel.integrations.transformers.layers import ChosenExperts
from fairseq_tutel.moe import MoELayer

PAGE = Path(__file__).parents[3] / "fairseq_tutel/integrations/transformers/MODELS.md"
# Bound of the difference of logits, absolute plus relative. Linear attention amplifies rounding to
# 1.5e-5 on some CPUs; an error of 1 % in the layers' outputs changes the logits by 9e-4 or more.
LOGITS = 1e-4
BEGIN, END = "<!-- the table -->\n", "<!-- end of the table -->\n"


def row(folder: str) -> tuple[str, ...]:
    """Return folder, verdict, what is replaced, routing, activation, experts interface."""
    with_interface = "yes" if has_interface(folder) else "no"
    empty = tiny_models.refused(folder)
    if empty is not None:
        with pytest.raises(ValueError) as caught:
            replace_moe(empty)
        reason = str(caught.value).partition("cannot be replaced: ")[2]
        return folder, "refused", reason, "", "", with_interface
    model = tiny_models.make(folder)
    with torch.no_grad():
        want = tiny_models.logits(model)
        replace_moe(model)
        got = tiny_models.logits(model)
    verdict = "same" if torch.allclose(got, want, rtol=LOGITS, atol=LOGITS) else "DIFFERENT"
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    kinds = {"experts" if isinstance(layer, ChosenExperts) else "block" for layer in layers}
    own = any(isinstance(layer.experts, KeptExperts) for layer in layers)
    activation = "the model's" if own else "built-in"
    return folder, verdict, _join(kinds), _join(map(_routing, layers)), activation, with_interface


def _routing(layer: MoELayer) -> str:
    config = layer.config
    if isinstance(layer, ChosenExperts):
        return "the model's"
    words = [config.score_function]
    if config.num_expert_groups > 1:
        words.append(f"groups by {config.group_score}")
    words += ["bias"] * (config.load_bias != "none")
    words += ["not normalised"] * config.unnormalized_weights
    words += ["scaled"] * (config.route_scale != 1)
    if layer.shared_expert is not None:
        words.append("shared expert" + " with a gate" * (layer.shared_expert.gate is not None))
    return ", ".join(words)


def _join(words) -> str:
    return "; ".join(sorted(set(words)))


def has_interface(folder: str) -> bool:
    """Return whether transformers' experts interface is in a folder."""
    path = Path(transformers.__file__).parent / "models" / folder / f"modeling_{folder}.py"
    return "@use_experts_implementation" in path.read_text(encoding="utf-8")


def table() -> str:
    """Return the tables of all folders: those with the same logits by kind, and the refused."""
    rows = [row(folder) for folder in tiny_models.folders()]
    kinds: dict[tuple[str, ...], list[str]] = {}
    for folder, verdict, *kind, _ in rows:
        if verdict == "same":
            kinds.setdefault(tuple(kind), []).append(folder)
    heads = ("layer", "routing", "activation", "folders")
    same = [(*kind, ", ".join(found)) for kind, found in sorted(kinds.items())]
    refused = [(folder, f"{v}: {kind}") for folder, v, kind, *_ in rows if v != "same"]
    without = ", ".join(folder for folder, *_, interface in rows if interface == "no")
    return (
        f"{_table(heads, same)}\n{_table(('folder', 'verdict'), refused)}\n"
        f"Folders without the experts interface: {without}.\n"
    )


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def folders_on_page(kind: str) -> list[str]:
    """Return the folders of which the page says that a layer takes this place."""
    found = re.findall(rf"^\| {kind} \|.*\| ([^|]+) \|$", on_page(), re.M)
    return [folder for folders in found for folder in folders.split(", ")]


def on_page() -> str:
    """Return the table that the page has."""
    text = PAGE.read_text(encoding="utf-8")
    return text.partition(BEGIN)[2].partition(END)[0]


def verdicts() -> Counter[str]:
    """Return how many folders have each verdict, and each kind of layer if logits are the same."""
    found: Counter[str] = Counter()
    for folder in tiny_models.folders():
        try:
            if tiny_models.refused(folder) is None:
                tiny_models.logits(tiny_models.make(folder))
        except Exception:  # of transformers, or of its extensions
            found["does not run by itself"] += 1
            continue
        try:
            _, verdict, kind, *_ = row(folder)
        except ValueError:
            verdict = "refused"
        found[f"{verdict} ({kind})" if verdict == "same" else verdict] += 1
        if verdict == "DIFFERENT":
            print(f"{folder}: other logits")
    return found


if __name__ == "__main__" and "--verdicts" in sys.argv:
    counts = verdicts()
    print("; ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    sys.exit("DIFFERENT" in counts)
elif __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8").replace(on_page(), table())
    PAGE.write_text(page, encoding="utf-8")
    sys.exit("DIFFERENT" in on_page())
