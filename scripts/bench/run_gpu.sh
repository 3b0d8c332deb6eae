#!/usr/bin/env bash
# Measures on one GPU everything that this project claims about GPUs, in two parts of less than nine
# minutes each, the most important first. Triton needs a C compiler at run time.
#
#   part 1   GPU tests of kernels, operators and layer; the layer at meta-1.1t and without a
#            capacity; operators at meta-1.1t; products by candidate; training of one simulated
#            rank of the 1.1T model
#   part 2   SwinV2-MoE; the layer and training at the other GPU presets; steps of generation in a
#            CUDA graph; the other GPU tests
#
#   bash scripts/bench/run_gpu.sh                       # both parts; results in scripts/bench/results
#   PART=1 OUT=folder bash scripts/bench/run_gpu.sh     # results in folder/results-1.tar.gz
#
# A step that is stopped, by its limit or by Ctrl-C, keeps its results and prints its goals; after
# Ctrl-C the other steps are left out. Without fairseq the steps that need it fail.
#
# Environment:
#   PART       1 or 2 (default: both, one after the other)
#   OUT        folder for an archive of all results, a summary and the log, instead of the repository
#   PYTHON     interpreter with torch, triton and fairseq (default: python3)
#   WHEELS     folder of wheels to use if fairseq cannot be imported (on a machine that reaches no
#              package index); installed into a temporary folder. They must fit this Python.
#   COMMIT     commit of these files, for a copy without a repository: what
#              git describe --always --abbrev=40 --dirty says
#   BUDGET     seconds for each part (default: 520); what no longer fits is left out and named
#   ONLY       run only the steps whose name matches this pattern of bash, e.g. 'layer-*'
#   WORKERS    processes of the GPU tests (default: 12, each with its own context on the GPU)
#   DRY_RUN    1: rehearse every step on a CPU, at tiny sizes; tests that need a GPU are collected
#
# The exit code is 0 if every step was run and succeeded.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
usage() {
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' scripts/bench/run_gpu.sh
}
case "${1:-}:${PART:-both}" in
    :1 | :2 | :both) ;;
    :*) echo "run_gpu.sh: PART=$PART: 1 or 2" >&2 && exit 2 ;;
    *) usage && exit ;;
esac

PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
begin=$SECONDS
warnings=()
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if [ -n "${WHEELS:-}" ] && ! "$PYTHON" -c 'import fairseq' 2>/dev/null; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$scratch/site" \
        "$WHEELS"/*.whl || warnings+=("the wheels in $WHEELS do not fit $("$PYTHON" --version)")
    export PYTHONPATH="$PYTHONPATH:$scratch/site"
fi
"$PYTHON" -c 'import fairseq' 2>/dev/null ||
    warnings+=("fairseq cannot be imported: train fails, and tests that need it")
command -v "${CC:-cc}" gcc clang >/dev/null ||
    warnings+=("no C compiler (CC, cc, gcc, clang): Triton cannot start")
device=cuda interpret=0
tiny=()
tests=(-v -n "${WORKERS:-12}" --dist worksteal)
if [ -n "${DRY_RUN:-}" ]; then
    gpu=cpu device=cpu interpret=1
    tiny=(--tiny)
    tests=(-q -n 0 --collect-only)
else
    gpu=$("$PYTHON" -c 'import re, torch
print(re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()))') || {
        echo "run_gpu.sh: torch sees no GPU here" >&2
        exit 2
    }
fi

results=scripts/bench/results
[ -n "${OUT:-}" ] && results=$scratch/results && mkdir -p "$results" "$OUT"
part_name=${PART:+-$PART}
log=${OUT:-$results}/run_gpu$part_name.log
summary=${OUT:-$results}/summary-$gpu$part_name.txt
: >"$log"
: >"$summary"
for warning in "${warnings[@]}"; do echo "WARNING: $warning" | tee -a "$log" "$summary"; done
failures=0
interrupted=
trap 'interrupted=interrupted' INT
# Lines of a benchmark's output that go into the summary.
telling='^(goal:|FAILED |ERROR )|: error:|SIMULATED|not run|(passed|failed|deselected|collected).* in [0-9]'

# step NAME SECONDS COMMAND ...: runs the command for at most so long and at most until the deadline.
step() {
    local name=$1 limit=$2 left=$((deadline - SECONDS)) status begin=$SECONDS
    shift 2
    # shellcheck disable=SC2053
    [[ $name == ${ONLY:-*} ]] || return 0
    if [ -n "$interrupted" ] || ((left < 15)); then
        echo "$name: LEFT OUT, ${interrupted:-no time}" | tee -a "$summary"
        failures=$((failures + 1))
        return
    fi
    [ -z "${DRY_RUN:-}" ] || limit=$((4 * limit)) # a busy machine stops no rehearsal
    ((limit > left)) && limit=$left
    echo "=== $name: $*" | tee -a "$log"
    # as by Ctrl-C: pytest then reports what it has. In the foreground the step gets a real Ctrl-C,
    # too; tee ignores it, so that the step's last lines are kept.
    timeout --foreground --signal=INT --kill-after=8 "$limit" "$@" 2>&1 |
        tee -i "$scratch/output" | tee -i -a "$log"
    status=${PIPESTATUS[0]}
    ((status == 0)) || failures=$((failures + 1))
    [ -z "$interrupted" ] || ((status == 0)) || status=130
    case $status in
        0) echo "$name: done, $((SECONDS - begin)) s" ;;
        124 | 137) echo "$name: STOPPED after $limit s" ;;
        130) echo "$name: INTERRUPTED after $((SECONDS - begin)) s" ;;
        *) echo "$name: FAILED ($status)" ;;
    esac | tee -a "$summary"
    grep -E "$telling" "$scratch/output" | sed 's/^/    /' >>"$summary"
    # after each step: whoever stops the whole script has what was measured before
    [ -z "${OUT:-}" ] || tar -czf "$OUT/results$part_name.tar.gz" -C "$results" .
}

# gpu_tests NAME SECONDS SELECTION ...: tests that need a GPU. They tune in the presence of others,
# so that what they choose is not kept for the benchmarks.
gpu_tests() {
    local name=$1 limit=$2
    shift 2
    OMP_NUM_THREADS=2 TRITON_CACHE_AUTOTUNING=0 step "$name" "$limit" "$PYTHON" -m pytest \
        -p no:cacheprovider --timeout 100 --tb=short "${tests[@]}" --junitxml "$results/$name-$gpu.xml" "$@"
}

# bench SECONDS KIND PRESET[,PRESET...] ARGUMENT ...: one benchmark, its results under names that
# say it all. What Triton tunes is kept for the processes that follow.
bench() {
    local limit=$1 kind=$2 preset=$3 name=$3
    shift 3
    [ "$kind" = layer ] && [ "$preset" != decode ] && name={preset}
    local which=(--preset "$preset")
    [ "$preset" = decode ] && which=() # a mode of its own, with its own sizes
    TRITON_CACHE_AUTOTUNING=1 step "$kind-$preset" "$limit" "$PYTHON" \
        "scripts/bench/bench_$kind.py" --device "$device" "${which[@]}" \
        --output "$results/$kind-$name-$gpu.json" "${tiny[@]}" "$@"
}

# No number on a red test: first what the kernels compute, then how fast. JUnit keeps the counts.
part_1() {
    gpu_tests tests-kernels 240 -m "gpu and not slow" tests/backends tests/ops tests/moe
    bench 180 layer meta-1.1t,dropless-16,dropless-16-fp16
    bench 60 kernels meta-1.1t
    TRITON_INTERPRET=$interpret bench 100 products dropless-16,dropless-64,fine-128
    # the plugin first; what it is compared with fits into more than 80 GB only, if at all
    bench 200 train meta-1.1t-rank --updates 6 --one-by-one --variants moe,flop-matched,dense
}

part_2() {
    bench 70 swin small-32
    bench 110 layer fig14,blog-8gpu,meta-8gpu,dropless-64,launches
    bench 120 train meta-half-rank --updates 5
    bench 30 kernels fig14
    bench 90 layer decode --mode decode
    bench 80 layer memory-4096,memory-8192,memory-16384,memory-32768 --repetitions 10
    bench 70 swin base-32 --repetitions 10
    gpu_tests tests-others 120 --continue-on-collection-errors -m gpu tests/backends/triton/test_large.py \
        tests/training tests/integrations tests/plan tests/distributed
}

for part in ${PART:-1 2}; do
    deadline=$((begin + ${BUDGET:-520}))
    "part_$part"
    begin=$SECONDS
done

echo
cat "$summary"
exit $((failures > 0))
