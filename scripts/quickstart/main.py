"""From text to a trained, evaluated and generating MoE language model, on this machine.

Called by scripts/quickstart.sh, which sees to the environment; see ``--help``.
"""

import argparse
import functools
import importlib.util
import logging
import os
import re
import shlex
import statistics
import sys
from pathlib import Path

from compared import RECIPES, Comparison, compare
from corpus import LINE_BREAK, CorpusError, build_corpus
from steps import EXPERTS, GPUS, RANKS, ROOT, Commands, QuickstartError, prepare, say
from tones import write_speech
from translation import UPDATES as TRANSLATION_UPDATES
from translation import translation

from fairseq_tutel import picture
from fairseq_tutel.command_line import run_and_exit

UPDATES = 140  # about 100 seconds in fp32 on two CPU cores
BLOCKS = 4000  # of text that BART is trained on
REQUIRED = 20  # times better than a guess, in a whole run on Python's library
VOCABULARY, TOKENS_PER_SAMPLE, SAMPLES_PER_UPDATE = 4000, 128, 16
# How functions, comments and paragraphs of the documentation begin in Python's library.
LIBRARY_PROMPTS = ["def __init__(self, name", "# This function returns", "The arguments of the"]

PREPROCESS = """fairseq-preprocess --only-source --trainpref pieces/train.txt
    --validpref pieces/valid.txt --testpref pieces/test.txt --destdir data --workers {workers}"""
# fairseq's default multiple, 8, leaves out the last batch of an epoch of another size.
PLUGIN = "--user-dir fairseq_tutel --task language_modeling --required-batch-size-multiple 1"
TRAIN = f"""{PLUGIN} --arch transformer_lm_gpt_moe
    --decoder-layers 4 --decoder-attention-heads 4
    --decoder-embed-dim 256 --decoder-ffn-embed-dim 1024 --dropout 0.0 --attention-dropout 0.0
    --moe-freq 2 --moe-top-k 2 --moe-preset balanced --moe-load-log-interval 5
    --criterion moe_cross_entropy
    --tokens-per-sample {TOKENS_PER_SAMPLE} --batch-size {max(1, SAMPLES_PER_UPDATE // RANKS)}"""
EVAL = f"""fairseq-eval-lm data {PLUGIN} --path checkpoints/checkpoint_last.pt --gen-subset {{side}}
    --tokens-per-sample {TOKENS_PER_SAMPLE} --batch-size {SAMPLES_PER_UPDATE}"""
INTERACTIVE = f"""fairseq-interactive data {PLUGIN} --path checkpoints/checkpoint_last.pt
    --input prompts.txt --bpe sentencepiece --sentencepiece-model tokenizer/sentencepiece.model
    --sampling --sampling-topk 20 --temperature 0.7 --beam 1 --max-len-a 0 --max-len-b 60
    --min-len 20 --seed 3 --buffer-size 3 --batch-size 3"""

EXPORT = """python -m fairseq_tutel.export huggingface checkpoints/checkpoint_last.pt transformers
    --data data --sentencepiece-model tokenizer/sentencepiece.model"""
COMPARE = f"""python {shlex.quote(str(Path(__file__).with_name("compare_export.py")))}
    checkpoints/checkpoint_last.pt transformers prompts.txt
    --data data --sentencepiece-model tokenizer/sentencepiece.model"""


class Quickstart(Commands):
    """Steps of the quickstart, and what they found out."""

    def __init__(self, folder: Path, updates: int, texts: list[Path]):
        super().__init__(folder, updates)
        self.texts = texts
        self.perplexity: dict[str, float] = {}

    def tokenizer(self, corpus: dict[str, list[str]]) -> None:
        """White space stays as it is (source files), and a line break is a piece of its own."""
        for side, lines in corpus.items():
            say(f"      {side:<5} {len(lines):>6,} blocks, {sum(map(len, lines)):>9,} characters")
        self.cut_into_pieces(
            {f"{side}.txt": lines for side, lines in corpus.items()}, ["train.txt"],
            vocab_size=VOCABULARY, character_coverage=0.9999, normalization_rule_name="identity",
            remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
            user_defined_symbols=[LINE_BREAK], max_sentence_length=100_000,
        )  # fmt: skip

    def preprocess(self) -> None:
        """Make fairseq's data-bin."""
        self.run("preprocess", PREPROCESS.format(workers=min(4, os.cpu_count() or 1)))

    def train(self, stop_at: int) -> None:
        """Train up to an update."""
        self.train_up_to(stop_at, TRAIN, warmup=30, validations=4, lines=16)

    def use(self, blocks: list[str]) -> None:
        """Evaluate both held-out sides, complete three prompts and export the model."""
        prompts, sides = self._prompts(blocks), ("valid", "test")
        evaluations = [(f"eval-lm-{side}", EVAL.format(side=side)) for side in sides]
        others = [("complete", INTERACTIVE), ("export", EXPORT)]
        *evaluated, completed, _ = self.run_together(*evaluations, *others)
        for side, lines in zip(sides, evaluated, strict=True):
            self.perplexity[side] = float(re.findall(r"Perplexity: ([\d.]+)", "\n".join(lines))[-1])
            say(f"      {side} perplexity {self.perplexity[side]:,.1f}")
        found = (re.match(r"D-(\d+)\t[^\t]*\t(.*)", line) for line in completed)
        texts = {int(match[1]): match[2].split(LINE_BREAK) for match in found if match}
        for number, prompt in enumerate(prompts):
            say(f"\n      prompt: {prompt}")
            say("\n".join(f"      | {line}" for line in texts[number]))
        say(f"\n      {self.folder / 'transformers'}: model, code and tokenizer")
        if importlib.util.find_spec("transformers") is None:
            say("      not loaded again: transformers is not installed")
            return
        *_, compared = self.run("compare", COMPARE)
        say(f"      {compared}")

    def _prompts(self, blocks: list[str]) -> list[str]:
        """Prompts of Python's library; of a user's text the beginnings of three held-out blocks."""
        prompts = LIBRARY_PROMPTS
        if self.texts:
            words = [block.replace(LINE_BREAK, " ").split() for block in blocks]
            words = [each for each in words if len(each) > 12] or words
            prompts = [" ".join(each[:4]) for each in words[:: max(1, len(words) // 3)][:3]]
        lines = "".join(f"{prompt}\n" for prompt in prompts)
        (self.folder / "prompts.txt").write_text(lines, encoding="utf-8")
        return prompts

    def report(self) -> float:
        """Draw the pictures, print the table; return how many times better than a guess it is."""
        log = self.folder / "logs" / "train.log"
        picture.draw_run(self.folder / "checkpoints", log, self.folder)
        curves = picture.read_log(log)
        last = [curves.train[update] for update in sorted(curves.train)]
        last = last[-max(1, len(last) // 4) :]
        mean = {name: statistics.mean(line[name] for line in last) for name in last[-1]}
        end = curves.valid[max(curves.valid)]["ppl"]
        guess = len((self.folder / "data/dict.txt").read_text(encoding="utf-8").splitlines())
        valid, test = self.perplexity["valid"], self.perplexity["test"]
        say(f"""
valid perplexity                 {end:,.1f} after {self.updates} updates
a guess among all pieces         {guess:,}   ({guess / end:,.0f} times as much)
fairseq-eval-lm, valid and test  {valid:,.1f} and {test:,.1f}   (1 process)
training                         {mean["wps"]:,.0f} tokens/s on {RANKS} {"GPU" if GPUS else "CPU"} \
ranks, {EXPERTS} experts in each MoE layer
experts: mean load / largest     {mean["moe_util_load"]:.1f} %
everything, with the pictures    {self.folder}""")
        return guess / end


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Options of the quickstarts."""
    parser = argparse.ArgumentParser(
        prog="scripts/quickstart.sh",
        description="Train a small mixture-of-experts language model with fairseq, evaluate it, "
        "let it write, and draw what happened.",
    )
    add = parser.add_argument
    text = "text files (UTF-8), or folders of them; default: the Python library's"
    add("text", nargs="*", type=Path, help=text)
    translate = (
        "train a translation model, on numbers in words of several languages, or on parallel "
    )
    translate += "files: NAME.de and NAME.en, say, of one sentence per line"
    recipe = parser.add_mutually_exclusive_group()
    choose = functools.partial(recipe.add_argument, dest="recipe", action="store_const", default="")
    choose("--translation", const="translation", help=translate)
    compared = ", once dense and once with experts"
    choose("--speech", const="speech", help=f"train a recogniser of generated speech{compared}")
    choose("--bart", const="bart", help=f"train BART on text{compared}")
    default = {"": UPDATES, "translation": TRANSLATION_UPDATES}
    default |= {name: each.updates for name, each in RECIPES.items()}
    about = ", ".join(f"{updates} {name}".strip() for name, updates in default.items())
    add("--updates", type=int, metavar="N", help=f"default: {about}")
    add("--seeds", type=int, default=1, metavar="N", help="speech, BART: train with seeds 1 to N")
    where = "where the files go (default: runs/quickstart, or runs/quickstart-translation, ...)"
    add("--out", type=Path, metavar="FOLDER", help=where)
    args = parser.parse_args(argv)
    args.updates = args.updates or default[args.recipe]
    args.out = args.out or ROOT / "runs" / "-".join(filter(None, ("quickstart", args.recipe)))
    if args.recipe == "speech" and args.text:
        parser.error(f"{args.text[0]}: --speech generates its data")
    if args.updates < 8:
        parser.error(f"--updates {args.updates}: at least 8 are needed, to stop and resume halfway")
    return args


def main() -> int:
    """The exit code."""
    logging.disable(logging.INFO)  # importing fairseq lets every logger say everything
    args = parse_arguments(sys.argv[1:])
    try:
        if args.recipe == "translation":
            translation(args.text, args.out, args.updates)
            return 0
        out = args.out.absolute()
        if args.recipe == "speech":
            prepare(out)
            quick = Comparison(out, args.updates, RECIPES["speech"], args.seeds)
            compare(quick, [("Generate speech", write_speech, out / "data")])
            return 0
        corpus = build_corpus(args.text)  # before an earlier run is removed, as it may fail
        prepare(out)
        quick = Quickstart(out, args.updates, args.text)
        if args.recipe == "bart":
            corpus["train"] = corpus["train"][:BLOCKS]
            data = [
                ("Train a sentencepiece model", quick.tokenizer, corpus),
                ("fairseq-preprocess", quick.preprocess),
            ]
            compare(Comparison(out, args.updates, RECIPES["bart"], args.seeds), data)
            return 0
        quick.follow([
            ("Train a sentencepiece model", quick.tokenizer, corpus),
            ("fairseq-preprocess", quick.preprocess),
            ("Train the first half, then stop", quick.train, args.updates // 2),
            ("Resume from the checkpoint and train the second half", quick.train, args.updates),
            ("fairseq-eval-lm, three prompts for fairseq-interactive, export for transformers",
             quick.use, corpus["test"]),
        ])  # fmt: skip
        better = quick.report()
        if args.updates >= UPDATES and not args.text and not better >= REQUIRED:
            raise QuickstartError(f"only {better:.1f} times better than a guess, not {REQUIRED}")
    except (CorpusError, QuickstartError) as error:
        say(f"quickstart: error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    run_and_exit(main)
