#!/bin/bash
# Submits the benchmarks at every rung of the ladder, 8 to 512 GPUs. One layer, that of figure 14 of
# Tutel's paper, beside the dense formulation. The all-to-all, twice: with each rank bound to the
# cores of its GPU's NUMA node, and unbound. Training of the 1.1T configuration end to end with an
# even load, beside the dense formulation, with one expert per GPU and MoE layer. Nothing is saved
# but the results.
#
#   scripts/slurm/submit_ladder.sh [options] [-- SBATCH_OPTION ...]
#
# Options:
#   --gpus "8 16 ..."     rungs (default: 8 16 32 64 128 256 512)
#   --gpus-per-node N     (default: 8)
#   --jobs LIST           of layer, alltoall, train, separated by commas (default: all three)
#   --updates N           measured updates of each training run (default: 10)
#   --results DIR         for JSON files and logs (default: runs/ladder): layer-N.json, train-N.json,
#                         alltoall-N.json and alltoall-unbound-N.json
#   --tiny                rehearsal: sizes that take a CPU seconds
#   --dry-run             print the sbatch commands and submit nothing
#
# When the jobs are done, the last line that this prints draws their points into the figures of the
# published claims: python scripts/bench/claims.py --figures DIR/figures --measured DIR
#
# What stands after -- goes to every sbatch, as in: -- --partition gpu --account lab --time 1:00:00
# The environment that the batch scripts read (scripts/slurm/bench.sbatch --help) is passed on.

set -euo pipefail
here=$(dirname "$0")
source "$here/common.sh"

fail() {
    echo "submit_ladder.sh: $*" >&2
    exit 2
}
is_number() { [[ $1 =~ ^[1-9][0-9]*$ ]]; }

gpus="8 16 32 64 128 256 512" gpus_per_node=8 jobs=layer,alltoall,train
updates=10 results=runs/ladder dry_run=0 tiny=()
while (($#)); do
    case $1 in
        --help) usage "$0"; exit 0 ;;
        --dry-run) dry_run=1; shift ;;
        --tiny) tiny=(--tiny); shift ;;
        --) shift; break ;;
        --gpus | --gpus-per-node | --jobs | --updates | --results)
            (($# > 1)) || fail "$1 needs a value"
            option=${1#--}
            declare "${option//-/_}=$2"
            shift 2
            ;;
        *) fail "unknown option $1 (see --help; options of sbatch go after --)" ;;
    esac
done

is_number "$gpus_per_node" || fail "--gpus-per-node $gpus_per_node is not a positive number"
is_number "$updates" || fail "--updates $updates is not a positive number"
for count in $gpus; do
    is_number "$count" || fail "--gpus: $count is not a positive number"
    ((count < gpus_per_node || count % gpus_per_node == 0)) ||
        fail "--gpus: $count GPUs do not fill nodes of $gpus_per_node"
done
for job in ${jobs//,/ }; do
    [[ $job =~ ^(layer|alltoall|train)$ ]] || fail "--jobs: $job is none of layer, alltoall, train"
done

# submit NAME NODES GPUS_ON_EACH SCRIPT ARGUMENT ...; with more launcher options in `launch_options`.
submit() {
    local name=$1 nodes=$2 each=$3 script=$4 line=()
    shift 4
    [ -z "$launch_options" ] ||
        line=(env LAUNCH_OPTIONS="${LAUNCH_OPTIONS:+$LAUNCH_OPTIONS }$launch_options")
    line+=(sbatch --job-name "$name" --nodes "$nodes" --gpus-per-node "$each" --exclusive
        --output "$results/%x-%j.log" "${sbatch_options[@]}" "$here/$script" "$@" "${tiny[@]}")
    if ((dry_run)); then
        printf '%q ' "${line[@]}"
        echo
    else
        "${line[@]}"
    fi
}

sbatch_options=("$@") launch_options=''
((dry_run)) || mkdir -p "$results"
for count in $gpus; do
    nodes=$(((count + gpus_per_node - 1) / gpus_per_node))
    each=$((count < gpus_per_node ? count : gpus_per_node))
    for job in ${jobs//,/ }; do
        name=moe-$job-$count
        case $job in
            layer)
                submit "$name" "$nodes" "$each" bench.sbatch layer --preset fig14 \
                    --output "$results/layer-$count.json"
                ;;
            alltoall)
                submit "$name" "$nodes" "$each" bench.sbatch alltoall \
                    --output "$results/alltoall-$count.json"
                launch_options="--bind none"
                submit "moe-$job-unbound-$count" "$nodes" "$each" bench.sbatch alltoall \
                    --output "$results/alltoall-unbound-$count.json"
                launch_options=''
                ;;
            train)
                submit "$name" "$nodes" "$each" bench.sbatch train \
                    --preset meta-8gpu-rank --one-by-one --updates "$updates" \
                    --override "model.moe_benchmark='force_load=1'" \
                    --output "$results/train-$count.json"
                ;;
        esac
    done
done
if ((!dry_run)); then
    echo "figures: python scripts/bench/claims.py --figures $results/figures --measured $results"
fi
