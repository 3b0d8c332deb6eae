#!/usr/bin/env bash
# Trains a small mixture-of-experts language model with fairseq and this plugin, on the CPU or on
# all GPUs: tokenizer, fairseq-preprocess, training with a stop and a resume, fairseq-eval-lm, three
# completed prompts, an export for transformers, pictures and a table; about 3 minutes on 2 CPU
# cores. Results: runs/quickstart.
#
#   bash scripts/quickstart.sh                     # on the text that comes with Python
#   bash scripts/quickstart.sh book.txt notes/     # on your own text: UTF-8 files, folders of them
#
# With --translation, a multilingual translation model: accuracy and BLEU on held-out sentences,
# three translations, and which experts each language uses; about 3 minutes. Results:
# runs/quickstart-translation.
#
#   bash scripts/quickstart.sh --translation                      # numbers in words (num2words)
#   bash scripts/quickstart.sh --translation talks.de talks.en    # your own parallel files
#
# With --speech, a recogniser of generated tones, and with --bart, BART on text (Python's, or yours):
# each once dense and once with experts, for as many updates, and their losses side by side.
# --seeds 3 trains each with three seeds. Results: runs/quickstart-speech, runs/quickstart-bart.
#
#   bash scripts/quickstart.sh --speech
#   bash scripts/quickstart.sh --bart [book.txt notes/]
#
# --updates N trains longer or shorter, --out FOLDER writes elsewhere.
set -euo pipefail
SCRIPTS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
for argument in "$@"; do
    case "$argument" in
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$SCRIPTS/quickstart.sh"; exit ;;
    esac
done
source "$SCRIPTS/setup_env.sh"
exec python "$SCRIPTS/quickstart/main.py" "$@"
