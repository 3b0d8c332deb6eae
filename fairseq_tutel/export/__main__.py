"""Command line of the exports: huggingface, aot."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from ..command_line import EXIT_USAGE, CommandLine, run_and_exit
from ..config.options import above, at_least, in_range
from .aot import export_aot
from .huggingface import export_huggingface
from .tokenizer import TokenizerFiles

_CHECKPOINT = "NAME.pt, the index of a set, or one file; it is not changed"
_EPILOG = """\
examples:
  python -m fairseq_tutel.export huggingface checkpoints/checkpoint_best.pt my-model \\
    --data DATA --sentencepiece-model spm.model
  python -m fairseq_tutel.export aot checkpoints/checkpoint_best.pt model.pt2

Exports evaluate as fairseq generates: without a capacity, so nothing is dropped. The exit status
is 2, with the reason in one line on standard error, if something cannot be exported.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``python -m fairseq_tutel.export``."""
    parser = CommandLine(
        prog="python -m fairseq_tutel.export",
        description="Export a model with experts to transformers, or a language model to C++.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    hub = commands.add_parser(
        "huggingface",
        help="write a folder that transformers loads (language models: trust_remote_code=True)",
    )
    hub.set_defaults(run=_export_huggingface)
    hub.add_argument("checkpoint", metavar="CHECKPOINT", help=_CHECKPOINT)
    hub.add_argument("folder", metavar="FOLDER", type=Path, help="must be new or empty")
    hub.add_argument("--data", type=Path, help="dict.txt, or its folder (default: the data that "
                     "the checkpoint names)")  # fmt: skip
    hub.add_argument("--sentencepiece-model", type=Path, metavar="FILE",
                     help="split text by sentencepiece")  # fmt: skip
    for name, file in (("encoder-json", "encoder.json"), ("vocab-bpe", "vocab.bpe")):
        text = f"{file}: split text into GPT-2's byte pairs (give both files)"
        hub.add_argument(f"--gpt2-{name}", type=Path, metavar="FILE", help=text)
    hub.add_argument("--max-file-gb", type=in_range(float, above(0)), default=5.0, metavar="N",
                     help="largest file of weights, in 10^9 bytes (default 5.0)")  # fmt: skip
    ahead = commands.add_parser(
        "aot", help="write an AOTInductor package, which a C++ program runs without Python"
    )
    ahead.set_defaults(
        run=lambda a: export_aot(a.checkpoint, a.package, layer=a.layer, device=a.device)
    )
    ahead.add_argument("checkpoint", metavar="CHECKPOINT", help=_CHECKPOINT)
    ahead.add_argument("package", metavar="NAME.pt2", type=Path, help="must not exist")
    ahead.add_argument("--layer", type=in_range(int, at_least(0)), metavar="N", help="export one "
                       "decoder layer's router and experts (counted from 0)")  # fmt: skip
    ahead.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="device of the "
                       "package, which this machine must have (default %(default)s)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        print(args.run(args))
        return 0
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE


def _export_huggingface(args) -> Path:
    files = args.data, args.sentencepiece_model, args.gpt2_encoder_json, args.gpt2_vocab_bpe
    size = int(args.max_file_gb * 1e9)
    files = TokenizerFiles(*files)
    folder = export_huggingface(args.checkpoint, args.folder, files, max_bytes=size)
    print(f"{folder / 'README.md'} has the program that loads it", file=sys.stderr)
    return folder


if __name__ == "__main__":
    run_and_exit(main)
