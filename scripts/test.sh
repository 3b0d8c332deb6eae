#!/usr/bin/env bash
# Sets up .venv if need be, checks the code's style, and runs the tests. Arguments go to pytest:
#
#   bash scripts/test.sh                       # all of the package
#   bash scripts/test.sh tests/ops -k gating   # some, also of those below
#   bash scripts/test.sh --long                # whole programs, also of scripts/; the long fuzz
#   bash scripts/test.sh --extras              # beside other libraries
#   bash scripts/test.sh --second-isa          # what rounds, with the processor's oldest instructions
#   bash scripts/test.sh --fake-gpu            # layer, operators and ranks where torch finds a GPU
#
# Those beside other libraries are marked `extras` and have an environment of their own, .venv-extras
# (transformers, timm, accelerate, lightning, peft, deepspeed); elsewhere they are skipped. Three tests at a time
# (TEST_WORKERS=N: N), of which some only wait; with -n 0 they run in the pytest process itself.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
style=check
case "${1:-}" in
--extras) shift && EXTRAS=1 style="" stage=(-m extras) ;;
--long) shift && stage=(-m long) ;;
--second-isa)
    shift
    export ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2
    fairseq=tests/integrations/fairseq
    style="" stage=(-m "not long and not interpreted" tests/ops tests/moe/test_*experts.py
        tests/training/test_matrices.py "$fairseq"/test_{golden*,equivalence}.py)
    ;;
--fake-gpu)
    shift
    export FAKE_GPU=1
    style="" stage=(-m "not gpu and not long and not extras" tests/{moe,ops,backends,distributed})
    ;;
*)
    stage=()
    [[ "$*" == *tests* ]] || stage=(-m "not long and not extras")  # options alone: still the default
    ;;
esac
source scripts/setup_env.sh

# One thread per process: multi-rank tests start several, and small shapes gain nothing from more.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

status=0
if [ -n "$style" ]; then
    ruff check . || status=1
    ruff format --check --quiet . || { echo "ruff format . would change files" >&2; status=1; }
    # types, as the pinned torch states them: fairseq's official release has an older one
    [ "${FAIRSEQ:-fixed}" != fixed ] || basedpyright || status=1
fi
# A file goes to one process as a whole: what its tests share is computed once.
python -m pytest -n "${TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder "${stage[@]}" "$@" ||
    status=$?
exit "$status"
