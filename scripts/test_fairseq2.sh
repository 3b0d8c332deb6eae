#!/usr/bin/env bash
# Tests scripts/examples/hosts/with_fairseq2.py on 1 and 2 ranks: equal losses, and a run that resumes
# on the other number of ranks. Makes .venv-fairseq2, since fairseq2 requires other versions of torch
# and numpy (5 GB). Not part of continuous integration. $PYTHON: an interpreter; $VENV: a folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV="${VENV:-$PWD/.venv-fairseq2}" RECIPE="$PWD/scripts/examples/hosts/with_fairseq2.py"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="$PWD"
if [ ! -x "$VENV/bin/torchrun" ]; then
    "${PYTHON:-python3.11}" -m venv "$VENV"
    "$VENV/bin/pip" install --quiet fairseq2==0.8.1
fi
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

run() { # ranks, checkpoint, steps
    "$VENV/bin/torchrun" --standalone --nproc-per-node "$1" "$RECIPE" "$folder/$2/x.pt" --steps "$3" |
        tee >(cat >&2) | sed -n 's/^loss of step [0-9]*: //p'
}

one="$(run 1 one 10)" two="$(run 2 two 10)"
first="$(run 1 resumed 5)" resumed="$(run 2 resumed 10)"
"$VENV/bin/python" - "$one" "$two" "$first" "$resumed" <<'END'
import sys

one, two, first, resumed = map(float, sys.argv[1:])
assert one < 0.8 * first, "the loss does not fall"
for other in (two, resumed):
    assert abs(other - one) < 1e-3 * one, (one, other)
END
echo passed
