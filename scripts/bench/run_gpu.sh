#!/usr/bin/env bash
# Measures on one GPU everything that this project claims about GPUs: the GPU tests, the operators,
# the single layer at every GPU preset, and one simulated rank of the 1.1T model. About 8 minutes.
#
#   bash scripts/bench/run_gpu.sh                # results in scripts/bench/results
#   OUT=folder bash scripts/bench/run_gpu.sh     # results in folder/results.tar.gz and summary.txt
#
# Environment:
#   OUT        folder for one archive of all results, a summary and the log
#   PYTHON     interpreter with torch, triton and fairseq (default: python3)
#   WHEELS     folder of wheels to use where fairseq cannot be imported (on a machine that reaches
#              no package index); installed into a temporary folder
#   BUDGET     seconds for everything (default: 525); what no longer fits is left out and named
#   ONLY       run only the steps whose name matches this pattern of bash, e.g. 'layer-*'
#
# The exit code is 0 if every step was run and succeeded.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
case "${1:-}" in
    "") ;;
    *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' scripts/bench/run_gpu.sh; exit ;;
esac

PYTHON=${PYTHON:-python3}
deadline=$((SECONDS + ${BUDGET:-525}))
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if [ -n "${WHEELS:-}" ] && ! "$PYTHON" -c 'import fairseq' 2>/dev/null; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$scratch/site" \
        "$WHEELS"/*.whl || exit 2
    export PYTHONPATH="$PYTHONPATH:$scratch/site"
fi
gpu=$("$PYTHON" -c 'import re, torch
print(re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()))') || {
    echo "run_gpu.sh: torch sees no GPU here" >&2
    exit 2
}

results=scripts/bench/results
[ -n "${OUT:-}" ] && results=$scratch/results && mkdir -p "$results" "$OUT"
log=${OUT:-$results}/run_gpu.log
summary=${OUT:-$results}/summary-$gpu.txt
: >"$log"
: >"$summary"
failures=0
# Lines of a benchmark's output that go into the summary.
telling='^(goal:|tokens/s|SIMULATED|operators on)|times faster than torch|not run|(passed|failed|deselected).* in [0-9]'

# step NAME SECONDS COMMAND ...: runs the command for at most so long and at most until the deadline.
step() {
    local name=$1 limit=$2 left=$((deadline - SECONDS)) status begin=$SECONDS
    shift 2
    # shellcheck disable=SC2053
    [[ $name == ${ONLY:-*} ]] || return 0
    if ((left < 15)); then
        echo "$name: LEFT OUT, no time" | tee -a "$summary"
        failures=$((failures + 1))
        return
    fi
    ((limit > left)) && limit=$left
    echo "=== $name: $*" | tee -a "$log"
    timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$scratch/output" | tee -a "$log"
    status=${PIPESTATUS[0]}
    ((status == 0)) || failures=$((failures + 1))
    case $status in
        0) echo "$name: done, $((SECONDS - begin)) s" ;;
        124 | 137) echo "$name: STOPPED after $limit s" ;;
        *) echo "$name: FAILED ($status)" ;;
    esac | tee -a "$summary"
    grep -E "$telling" "$scratch/output" | sed 's/^/    /' >>"$summary"
}

# bench SECONDS KIND PRESET ARGUMENT ...: one benchmark, its result under a name that says it all.
bench() {
    local limit=$1 kind=$2 preset=$3
    shift 3
    step "$kind-$preset" "$limit" "$PYTHON" "scripts/bench/bench_$kind.py" --device cuda \
        --preset "$preset" --output "$results/$kind-$preset-$gpu.json" "$@"
}

# No figure on a red test: first what the kernels compute, then how fast. JUnit keeps the counts.
step tests 130 "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider --timeout 60 \
    --junitxml "$results/tests-$gpu.xml" tests
bench 60 layer meta-1.1t
bench 45 kernels meta-1.1t
bench 40 layer fig14
bench 40 layer blog-8gpu
bench 150 train meta-1.1t-rank --updates 8
bench 60 layer meta-8gpu
bench 30 kernels fig14
for tokens in 4096 8192 16384 32768; do
    bench 25 layer "memory-$tokens" --repetitions 10
done
step figures 30 "$PYTHON" scripts/bench/plot.py "$results"/*-"$gpu".json --out "$results/figures-$gpu"

[ -n "${OUT:-}" ] && tar -czf "$OUT/results.tar.gz" -C "$results" .
echo
cat "$summary"
exit $((failures > 0))
