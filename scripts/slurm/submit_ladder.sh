#!/bin/bash
# Submits the benchmark of the 1.1T configuration at every rung of the ladder, 8 to 512 GPUs: the
# single layer, the all-to-all and the training (its log tells the words per second; nothing is
# saved), with one expert per GPU and MoE layer.
#
#   scripts/slurm/submit_ladder.sh [options] [-- SBATCH_OPTION ...]
#
# Options:
#   --gpus "8 16 ..."     rungs (default: 8 16 32 64 128 256 512)
#   --gpus-per-node N     (default: 8)
#   --jobs LIST           of layer, alltoall, train, separated by commas (default: all three)
#   --config NAME         training configuration in configs/ (default: meta_1.1t)
#   --updates N           updates of each training run (default: 100)
#   --results DIR         for the benchmarks' JSON files and all logs (default: runs/ladder)
#   --dry-run             print the sbatch commands and submit nothing
#
# What stands after -- goes to every sbatch, as in: -- --partition gpu --account lab --time 1:00:00
# The environment that the batch scripts read (scripts/slurm/train.sbatch --help) is passed on.

set -euo pipefail
here=$(dirname "$0")
source "$here/common.sh"

fail() {
    echo "submit_ladder.sh: $*" >&2
    exit 2
}
is_number() { [[ $1 =~ ^[1-9][0-9]*$ ]]; }

gpus="8 16 32 64 128 256 512" gpus_per_node=8 jobs=layer,alltoall,train config=meta_1.1t
updates=100 results=runs/ladder dry_run=0
while (($#)); do
    case $1 in
        --help)
            usage "$0"
            exit 0
            ;;
        --dry-run)
            dry_run=1
            shift
            continue
            ;;
        --)
            shift
            break
            ;;
        --gpus | --gpus-per-node | --jobs | --config | --updates | --results)
            (($# > 1)) || fail "$1 needs a value"
            ;;
        *) fail "unknown option $1 (see --help; options of sbatch go after --)" ;;
    esac
    case $1 in
        --gpus) gpus=$2 ;;
        --gpus-per-node) gpus_per_node=$2 ;;
        --jobs) jobs=$2 ;;
        --config) config=$2 ;;
        --updates) updates=$2 ;;
        --results) results=$2 ;;
    esac
    shift 2
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

# submit NAME NODES GPUS_ON_EACH SCRIPT ARGUMENT ...
submit() {
    local name=$1 nodes=$2 each=$3 script=$4
    shift 4
    local line=(sbatch --job-name "$name" --nodes "$nodes" --gpus-per-node "$each" --exclusive
        --output "$results/%x-%j.log" "${sbatch_options[@]}" "$here/$script" "$@")
    if ((dry_run)); then
        printf '%q ' "${line[@]}"
        echo
    else
        "${line[@]}"
    fi
}

sbatch_options=("$@")
((dry_run)) || mkdir -p "$results"
for count in $gpus; do
    nodes=$(((count + gpus_per_node - 1) / gpus_per_node))
    each=$((count < gpus_per_node ? count : gpus_per_node))
    for job in ${jobs//,/ }; do
        name=moe-$job-$count
        case $job in
            layer)
                submit "$name" "$nodes" "$each" bench_layer.sbatch --preset meta-1.1t \
                    --experts "$count" --output "$results/layer-$count.json"
                ;;
            alltoall)
                submit "$name" "$nodes" "$each" bench_alltoall.sbatch \
                    --output "$results/alltoall-$count.json"
                ;;
            train)
                submit "$name" "$nodes" "$each" train.sbatch \
                    fairseq-hydra-train --config-dir configs --config-name "$config" \
                    "model.moe_expert_count=$count" "optimization.max_update=$updates" \
                    checkpoint.no_save=true
                ;;
        esac
    done
done
