"""From pairs of sentences to a multilingual translation model with experts, on this machine."""

import os
import re
import time
from pathlib import Path

from parallel import SIDES, Pairs, build_pairs
from sacrebleu import corpus_bleu
from steps import EXPERTS, GPUS, RANKS, Commands, QuickstartError, prepare, say

from fairseq_tutel import picture

UPDATES = 900  # about 170 seconds in fp32 on two CPU cores
# percent of held-out numbers that come out right, word for word; one CPU had 86, and others have
# other values, because rounding sends some tokens to other experts
REQUIRED = 70
VOCABULARY = {True: 400, False: 8000}  # of numbers; of other text
MAX_TOKENS = 1536  # of an update, over all ranks

DICTIONARY = "dict.txt"
PREPROCESS = """fairseq-preprocess --source-lang {source} --target-lang {target}
    --srcdict dict.txt --tgtdict dict.txt --trainpref pieces/{pair}.train
    --validpref pieces/{pair}.valid --testpref pieces/{pair}.test --destdir data
    --workers {workers}"""
# languages of sentences and translations as tokens, as NLLB has them
LANGUAGES = """--task translation_multi_simple_epoch --langs LANGS --lang-pairs PAIRS
    --encoder-langtok src --decoder-langtok --user-dir fairseq_tutel
    --required-batch-size-multiple 1"""
TRAIN = f"""{LANGUAGES} --sampling-method temperature --sampling-temperature 1
    --arch transformer_moe --encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 128
    --encoder-ffn-embed-dim 512 --encoder-attention-heads 4 --decoder-attention-heads 4
    --encoder-normalize-before --decoder-normalize-before --share-all-embeddings
    --max-source-positions 256 --max-target-positions 256 --dropout 0.0
    --moe-freq 2 --moe-second-expert-policy all --use-moe-pad-mask --moe-load-log-interval 10
    --criterion moe_label_smoothed_cross_entropy --label-smoothing 0.1 --moe-gate-loss-wt 0.01
    --moe-gate-loss-combine-method sum --max-tokens {MAX_TOKENS // RANKS}"""
GENERATE = f"""fairseq-generate data {LANGUAGES} --path checkpoints/checkpoint_last.pt
    --source-lang {{source}} --target-lang {{target}} --gen-subset test --beam 4
    --max-len-a 2 --max-len-b 20 --batch-size 100 --bpe sentencepiece
    --sentencepiece-model tokenizer/sentencepiece.model --scoring sacrebleu --num-workers 0"""


class Translation(Commands):
    """Steps of the quickstart for translation, and what they found out."""

    def __init__(self, folder: Path, updates: int, corpus: dict[tuple[str, str], Pairs], own: bool):
        super().__init__(folder, updates)
        self.corpus, self.own = corpus, own
        self.languages = list(dict.fromkeys(name for pair in corpus for name in pair))
        self.directions = [d for pair in corpus for d in (pair, pair[::-1])]
        # (sentence, translation by the model, translation of the data), by direction
        self.translated: dict[tuple[str, str], list[tuple[str, str, str]]] = {}

    def _multilingual(self, command: str) -> str:
        """Return a command of the task, which wants all languages and directions in one order."""
        pairs = ",".join(map("-".join, self.directions))
        return command.replace("LANGS", ",".join(self.languages)).replace("PAIRS", pairs)

    def tokenizer(self) -> None:
        """One sentencepiece model of all languages, and fairseq's dictionary of its pieces."""
        texts = {}
        for pair, sides in self.corpus.items():
            name = "-".join(pair)
            say(f"      {name}  {', '.join(f'{len(sides[side]):,} {side}' for side in SIDES)}")
            for side in SIDES:
                for language, lines in zip(pair, zip(*sides[side], strict=True), strict=True):
                    texts[f"{name}.{side}.{language}"] = list(lines)
        processor = self.cut_into_pieces(
            texts, [name for name in texts if ".train." in name],
            vocab_size=VOCABULARY[not self.own], character_coverage=0.9999 if self.own else 1.0,
        )  # fmt: skip
        names = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
        text = "".join(f"{name} 1\n" for name in names)
        (self.folder / DICTIONARY).write_text(text, encoding="utf-8")

    def preprocess(self) -> None:
        """fairseq's data-bin, one command per pair of languages; a pair serves both directions."""
        commands = []
        for source, target in self.corpus:
            pair, workers = f"{source}-{target}", max(1, (os.cpu_count() or 1) // 2)
            names = {"source": source, "target": target, "pair": pair, "workers": workers}
            commands.append((f"preprocess-{pair}", PREPROCESS.format(**names)))
        self.run_together(*commands)

    def train(self, stop_at: int) -> None:
        """Train up to an update."""
        command = self._multilingual(TRAIN)
        self.train_up_to(stop_at, command, warmup=100, validations=4, lines=20, loss="nll_loss")

    def generate(self) -> None:
        """Translate what was held out, in every direction."""
        commands = [
            (f"generate-{source}-{target}",
             self._multilingual(GENERATE).format(source=source, target=target))
            for source, target in self.directions
        ]  # fmt: skip
        for direction, lines in zip(self.directions, self.run_together(*commands), strict=True):
            rows: dict[str, dict[int, str]] = {"S": {}, "D": {}, "T": {}}
            for line in lines:
                if found := re.match(r"([SDT])-(\d+)\t(?:-?[\d.]+\t)?(.*)", line):
                    rows[found[1]][int(found[2])] = found[3]
            token = re.compile(r"^__\w+__ ")
            self.translated[direction] = [
                tuple(token.sub("", rows[kind][i]) for kind in "SDT") for i in sorted(rows["D"])
            ]

    def picture(self) -> None:
        """Draw which experts each language uses, in every MoE layer."""
        # here, since importing fairseq prints warnings before main.py filters them
        from expert_use import draw_use, expert_use

        checkpoint = self.folder / "checkpoints" / "checkpoint_last.pt"
        samples = {pair: [p for p in self.corpus[pair]["test"]] for pair in self.corpus}
        model = self.folder / "tokenizer" / "sentencepiece.model"
        draw_use(expert_use(checkpoint, samples, model), self.folder / "languages.png")
        picture.draw_run(
            self.folder / "checkpoints", self.folder / "logs" / "train.log", self.folder
        )

    def report(self) -> float:
        """Print the table and three translations; the percentage that is right, word for word."""
        say("\ndirection   exact    BLEU   (held-out sentences; sacrebleu, - without four words)")
        for direction, rows in self.translated.items():
            say(f"{'-'.join(direction):<10} {_exact(rows):5.1f} %  {_bleu(rows)}")
        rows_of_all = [row for each in self.translated.values() for row in each]
        say(f"{'all':<10} {_exact(rows_of_all):5.1f} %  {_bleu(rows_of_all)}")
        say("\nthree translations")
        for number in range(3):
            direction = self.directions[(0, 3, 4)[number] % len(self.directions)]
            rows = self.translated[direction]
            source, ours, wanted = rows[(number + 1) * len(rows) // 4]
            verdict = "right" if ours == wanted else f"in the data: {wanted}"
            say(f"  {'-'.join(direction)}  {source}\n      -> {ours}  ({verdict})")
        return _exact(rows_of_all)


def _exact(rows: list[tuple[str, str, str]]) -> float:
    return 100 * sum(ours == wanted for _, ours, wanted in rows) / max(1, len(rows))


def _bleu(rows: list[tuple[str, str, str]]) -> str:
    bleu = corpus_bleu([row[1] for row in rows], [[row[2] for row in rows]])
    return f"{bleu.score:6.1f}" if bleu.totals[3] else "     -"  # a German number is one word


def translation(paths: list[Path], out: Path, updates: int) -> None:
    """The whole quickstart. Raises CorpusError for its data, QuickstartError for a step that fails,
    or for numbers that were not learnt."""
    corpus = build_pairs(paths)  # before an earlier run is removed, as it may fail
    prepare(out)
    quick = Translation(out.absolute(), updates, corpus, own=bool(paths))
    quick.follow([
        ("Train a sentencepiece model", quick.tokenizer),
        ("fairseq-preprocess", quick.preprocess),
        ("Train the first half, then stop", quick.train, updates // 2),
        ("Resume from the checkpoint and train the second half", quick.train, updates),
        ("Translate held-out sentences with fairseq-generate", quick.generate),
        ("Draw which experts each language uses", quick.picture),
    ])  # fmt: skip
    exact = quick.report()
    say(f"\n{EXPERTS} experts in each MoE layer, on {RANKS} {'GPU' if GPUS else 'CPU'} ranks")
    say(f"{time.monotonic() - quick.begin:.0f} s; everything, with the pictures: {quick.folder}")
    if updates >= UPDATES and not paths and not exact >= REQUIRED:
        raise QuickstartError(f"only {exact:.1f} % of the numbers came out right, not {REQUIRED} %")
