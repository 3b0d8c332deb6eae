"""Count and draw the load of every expert by language."""

import warnings
from pathlib import Path

import sentencepiece
import torch
from fairseq import checkpoint_utils
from fairseq.data import data_utils

import fairseq_tutel

fairseq_tutel.register()
Use = dict[str, dict[str, list[float]]]  # by layer and language: share of the choices per expert


@torch.no_grad()
def expert_use(checkpoint: Path, samples: dict[tuple[str, str], list], tokenizer: Path) -> Use:
    """Count the experts' use: by sentences in the encoder, by translations in the decoder.

    Args:
        samples: pairs of sentences by their two languages, which are read in both directions.
    """
    overrides = {"data": str(checkpoint.parents[1] / "data")}
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides=overrides
    )
    model, dictionary = models[0].eval(), task.source_dictionary
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))

    def encoded(text: str, language: str, reverse: bool) -> torch.Tensor:
        words = " ".join(pieces.encode(text, out_type=str))
        line = dictionary.encode_line(words, add_if_not_exist=False).long()
        token = torch.tensor([dictionary.index(f"__{language}__")])
        if reverse:  # the decoder's input: </s> __language__ words
            return torch.cat([line[-1:], token, line[:-1]])
        return torch.cat([token, line])

    loads: dict[tuple[str, str], torch.Tensor] = {}
    for (one, other), pairs in samples.items():
        for source, target, turn in ((one, other, False), (other, one, True)):
            rows = [pair[::-1] if turn else pair for pair in pairs]
            sentences = [encoded(row[0], source, False) for row in rows]
            translations = [encoded(row[1], target, True) for row in rows]
            collate = data_utils.collate_tokens
            with warnings.catch_warnings():  # about the masks of fairseq's attention
                warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask")
                _, extra = model(
                    collate(sentences, dictionary.pad(), left_pad=True),
                    torch.tensor(list(map(len, sentences))),
                    collate(translations, dictionary.pad()),
                )
            for layer, aux in zip(model.moe_layers, extra["moe"], strict=True):
                language = source if layer.startswith("encoder") else target
                before = loads.get((layer, language), 0)
                loads[layer, language] = before + aux.load_E.double()
    use: Use = {}
    for (layer, language), load in loads.items():
        use.setdefault(layer, {})[language] = (load / load.sum()).tolist()
    return use


def draw_use(use: Use, file: Path) -> None:
    """A heat map per MoE layer: languages by experts, relative to an even share."""
    from matplotlib.figure import Figure

    rows = max(map(len, use.values()))
    figure = Figure(figsize=(7.5, 1 + len(use) * (0.9 + 0.35 * rows)), layout="constrained")
    grid = figure.subplots(len(use), 1, squeeze=False)[:, 0]
    for axes, (layer, shares) in zip(grid, use.items(), strict=True):
        names = sorted(shares)
        relative = [[share * len(shares[name]) for share in shares[name]] for name in names]
        mesh = axes.imshow(relative, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
        for y, row in enumerate(relative):
            for x, value in enumerate(row):
                how = {"fontsize": 8, "color": "white" if abs(value - 1) > 0.7 else "black"}
                axes.text(x, y, f"{value:.1f}", ha="center", va="center", **how)
        side, _, number = layer.partition(".")
        what = "sentences" if side == "encoder" else "translations"
        axes.set_title(f"{side}, layer {number} (the first is 0), by the language of its {what}")
        axes.set(yticks=range(len(names)), yticklabels=names, xticks=range(len(relative[0])))
        axes.set_xlabel("expert")
    bar = figure.colorbar(mesh, ax=list(grid), extend="max", ticks=[0, 1, 2])
    bar.set_label("load relative to an even share")
    figure.savefig(file, dpi=150)
