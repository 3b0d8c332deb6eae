#!/bin/bash
# Tests the scripts of this folder on a real SLURM: starts a throwaway cluster of two virtual nodes on
# this machine, trains on 2 nodes x 2 CPU ranks with train.sbatch, has the job saved and requeued by
# SIGUSR1 and then requeued the hard way, checks that it resumed both times and finished, and takes
# the cluster down again. Takes one to three minutes.
#
#   scripts/slurm/test_cluster.sh [--keep]
#
#   --keep    leave the folder with logs and checkpoints, and print its name
#
# SLURM and munge come from Debian's packages, which are installed if they are missing and this is
# root on a Debian or Ubuntu. The cluster has its own configuration, munge key, ports and sockets in
# a temporary folder, so an installed SLURM is not touched. Python with fairseq is the one in PATH, or
# .venv as scripts/setup_env.sh makes it.

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
keep=0
case ${1:-} in
    '') ;;
    --keep) keep=1 ;;
    --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "unknown option $1 (see --help)" >&2; exit 2 ;;
esac

say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }
fail() {
    say "FAILED: $*" >&2
    exit 1
}

# --- what has to be installed ---------------------------------------------------------------------

PATH=$PATH:/usr/sbin:/sbin # munged and the daemons of SLURM
missing=()
for program in slurmctld slurmd munged:munge srun:slurm-client; do
    command -v "${program%:*}" >/dev/null || missing+=("${program#*:}")
done
if ((${#missing[@]})); then
    if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
        fail "needs ${missing[*]}; as root on Debian or Ubuntu this script installs them"
    fi
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } \
        >/tmp/slurm_packages.$$ 2>&1 || { tail -n 20 /tmp/slurm_packages.$$ >&2; fail "apt-get"; }
    rm -f /tmp/slurm_packages.$$
fi
if ! python -c 'import importlib.util as u, sys
sys.exit(not all(u.find_spec(name) for name in ("torch", "fairseq")))' 2>/dev/null; then
    # shellcheck disable=SC1091
    source "$root/scripts/setup_env.sh"
fi

# --- the cluster ----------------------------------------------------------------------------------

# An allocation that this script may run in must not leak into the cluster's jobs.
for name in $(compgen -e | grep -E '^(SLURM|SBATCH|SRUN|SALLOC|PMI|OMPI)_?' || true); do
    unset "$name"
done
unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES='' # 4 ranks on however few cores

work=$(mktemp -d "${TMPDIR:-/tmp}/slurm_test.XXXXXX")
chmod 755 "$work" # munged refuses folders that others can write to
mkdir "$work"/{state,logs}
export SLURM_CONF=$work/slurm.conf
daemons=()

stop_cluster() {
    local status=$? pid queue=
    set +e # whatever fails here, the rest of it is done, also when nobody reads the output
    trap - EXIT
    trap '' INT TERM HUP PIPE
    if ((${#daemons[@]})); then
        ((status != 0)) && queue=$(timeout 5 squeue -o '%i %j %T %r %C %N' 2>&1)
        timeout 10 scancel --user "$(id -un)" 2>/dev/null
        for ((i = 0; i < 50; i++)); do
            [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break
            sleep 0.2
        done
        timeout 10 scontrol shutdown 2>/dev/null
        kill "${daemons[@]}" 2>/dev/null
        for ((i = 0; i < 50; i++)); do
            kill -0 "${daemons[@]}" 2>/dev/null || break
            sleep 0.1
        done
        kill -9 "${daemons[@]}" 2>/dev/null
        wait "${daemons[@]}" 2>/dev/null
    fi
    if ((status != 0)); then
        printf '%s\n' "$queue"
        for log in "$work"/*.log "$work"/logs/*.log; do
            [ -s "$log" ] && printf -- '--- %s\n' "${log##*/}" && tail -n 25 "$log"
        done
    fi >&2
    if ((keep)); then say "kept $work"; else rm -rf "$work"; fi
    rm -rf "$root/${relative_directory:-runs/none}"
    ((status == 0)) && say "passed"
    exit "$status"
}
trap stop_cluster EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# wait_until SECONDS WHAT COMMAND ...: runs COMMAND until it succeeds.
wait_until() {
    local limit=$((SECONDS + $1)) what=$2
    shift 2
    until "$@"; do
        ((SECONDS < limit)) || fail "waited too long: $what"
        sleep 0.3
    done
    say "$what"
}

start_cluster() {
    local host ports user
    host=$(hostname -s) user=$(id -un)
    read -r -a ports <<<"$(python -c '
import socket
held = [socket.socket() for _ in range(3)]
for s in held:
    s.bind(("", 0))
print(*(s.getsockname()[1] for s in held))')"
    # cred_expire: a requeued job waits until the credentials of its last run have expired (120 s).
    # config_overrides: the nodes have 8 CPUs each, whatever this machine has.
    cat >"$SLURM_CONF" <<CONF
ClusterName=throwaway
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool.%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.%n.pid
SlurmctldLogFile=$work/logs/slurmctld.log
SlurmdLogFile=$work/logs/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,sched_min_interval=0,batch_sched_delay=0
JobRequeue=1
KillWait=5
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=virtual1 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=8 Gres=gpu:2 State=UNKNOWN
NodeName=virtual2 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=8 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=virtual[1-2] Default=YES MaxTime=10 State=UP
CONF
    # they only count: no GPU is behind these files
    printf 'Name=gpu File=%s\n' /dev/null /dev/zero >"$work/gres.conf"
    (umask 077 && head -c 1024 /dev/urandom >"$work/munge.key")
    munged --foreground --force --socket="$work/munge.socket" --key-file="$work/munge.key" \
        --pid-file="$work/munged.pid" --seed-file="$work/munge.seed" --num-threads=2 \
        --log-file="$work/logs/munged.log" >"$work/logs/munged.out.log" 2>&1 &
    daemons+=($!)
    wait_until 10 "munge answers" test -S "$work/munge.socket"
    slurmctld -D -i -f "$SLURM_CONF" >"$work/logs/slurmctld.out.log" 2>&1 &
    daemons+=($!)
    for node in virtual1 virtual2; do
        slurmd -D -N "$node" -f "$SLURM_CONF" >"$work/logs/slurmd.$node.out.log" 2>&1 &
        daemons+=($!)
    done
    wait_until 30 "two nodes are idle" nodes_are_idle
}
nodes_are_idle() { [ "$(timeout 5 sinfo -h -t idle -o %D 2>/dev/null)" = 2 ]; }

# --- questions to ask about a job -----------------------------------------------------------------

field() { timeout 5 scontrol show job "$1" 2>/dev/null | grep -oP "\b$2=\K\S+" | head -n 1; }
has_restarted() { (($(field "$1" Restarts || echo 0) >= $2)); }
has_ended() { [[ $(field "$1" JobState) =~ ^(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)$ ]]; }
# What run number $2 (0: the first) of the job with log $1 has written.
run_log() { [ -f "$1" ] && awk -v run="$2" '/^job .* restart [0-9]+:/ {n++} n == run + 1' "$1"; }
# The first or last thing that run $2 wrote matching the Perl expression $3; 0 if nothing does.
first_of() { run_log "$1" "$2" | grep -oP "$3" | head -n 1 | grep . || echo 0; }
last_of() { run_log "$1" "$2" | grep -oP "$3" | tail -n 1 | grep . || echo 0; }
updates() { last_of "$1" "$2" 'num_updates=\K\d+'; }
saved_at() { last_of "$1" "$2" 'Saved checkpoint .*@ \K\d+'; }
loaded_at() { last_of "$1" "$2" 'Loaded checkpoint .*@ \K\d+'; }
trains() {
    has_ended "$job" && fail "the job ended early: $(field "$job" JobState)"
    (($(updates "$1" "$2") >= $3))
}
has_saved_since_its_start() { trains "$1" "$2" 1 && (($(saved_at "$1" "$2") > $(loaded_at "$1" "$2"))); }

# ended_well JOB SECONDS WHAT: waits for the job's end; it must have completed.
ended_well() {
    wait_until "$2" "$3 ended" has_ended "$1"
    [ "$(field "$1" JobState)" = COMPLETED ] || fail "$3 is $(field "$1" JobState)"
}

# --- the tests ------------------------------------------------------------------------------------

# A job that does nothing until the signal that SLURM sends by itself before the time limit, and ends
# at once when it has been queued again. Runs beside the others.
submit_time_limit_job() {
    cat >"$work/until_usr1.sh" <<'SCRIPT'
trap 'exit 85' USR1
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && exit 0
while :; do sleep 0.2; done
SCRIPT
    limit_job=$(sbatch --parsable --nodes 1 --time 1 --signal=B:USR1@40 \
        --output "$work/limit.log" scripts/slurm/train.sbatch bash "$work/until_usr1.sh")
}

submit_training() {
    log=$work/train.log
    # --reset-optimizer: train.sbatch must drop it when the job restarts, or it counts from 0 again
    job=$(NPROC_PER_NODE=2 sbatch --parsable --nodes 2 --cpus-per-task 2 --output "$log" \
        scripts/slurm/train.sbatch \
        fairseq-train --user-dir fairseq_tutel --arch transformer_lm_gpt_moe \
        --criterion moe_cross_entropy --moe-expert-count 4 --moe-freq 2 --moe-gate-loss-wt 0.01 \
        --task dummy_lm --tokens-per-sample 32 --dict-size 96 --dataset-size 20000 \
        --decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 \
        --decoder-attention-heads 2 --optimizer adam --lr 0.001 --batch-size 2 \
        --max-update "$max_update" --log-format simple --log-interval 10 --disable-validation \
        --required-batch-size-multiple 1 --ddp-backend legacy_ddp --save-dir "$work/checkpoints" \
        --save-interval-updates 25 --keep-interval-updates 1 --reset-optimizer)
}

# train.sbatch as it comes: Hydra, with a save directory relative to where it was submitted.
submit_hydra_training() {
    hydra_job=$(NPROC_PER_NODE=2 CONFIG=tiny_cpu SAVE_DIR=$relative_directory \
        OVERRIDES="model.decoder_layers=2 optimization.max_update=4" \
        sbatch --parsable --nodes 2 --cpus-per-task 2 --dependency "afterany:${ladder_jobs[-1]}" \
        --output "$work/hydra.log" scripts/slurm/train.sbatch)
}

check_hydra_training() {
    local part
    ended_well "$hydra_job" 180 "the Hydra run"
    for part in shared rank-0 rank-1 rank-2 rank-3; do
        ls "$relative_directory"/checkpoint_last.pt.*-"$part.pt" > /dev/null || fail "it saved no part $part"
    done
    say "both nodes saved into one relative directory"
}

check_training() {
    local before resumed loss
    wait_until 180 "the first run trains" trains "$log" 0 20
    scancel --batch --signal=USR1 "$job"
    wait_until 120 "asked by SIGUSR1, it saved and was requeued" has_restarted "$job" 1
    run_log "$log" 0 | grep -q 'saved on request; queueing' || fail "train.sbatch did not requeue"
    wait_until 180 "the second run trains and has saved" has_saved_since_its_start "$log" 1
    before=$(updates "$log" 0) resumed=$(loaded_at "$log" 1)
    # It logs every 10 updates and saves at the end of the one in which the signal came.
    ((before <= resumed && resumed < before + 10)) ||
        fail "stopped after update $before, but resumed at $resumed"
    say "it resumed at update $resumed"

    scontrol requeue "$job"
    wait_until 120 "it was requeued the hard way" has_restarted "$job" 2
    before=$(saved_at "$log" 1)
    ended_well "$job" 240 "the job"
    resumed=$(loaded_at "$log" 2)
    ((resumed == before)) || fail "saved at update $before, but resumed at $resumed"
    say "it resumed at update $resumed"

    run_log "$log" 2 | grep -q "done training" || fail "the last run did not end its training"
    (($(saved_at "$log" 2) == max_update)) || fail "the last checkpoint is not of the last update"
    (($(field "$job" Restarts) == 2)) || fail "$(field "$job" Restarts) restarts instead of 2"
    grep -q 'launch: 4 ranks on 2 nodes (started by srun), gloo' "$log" || fail "not 2 x 2 ranks"
    loss="$(first_of "$log" 0 ' loss=\K[\d.]+') $(last_of "$log" 2 ' loss=\K[\d.]+')"
    # shellcheck disable=SC2086
    python -c 'import sys; first, last = map(float, sys.argv[1:]); sys.exit(last > 0.5 * first)' \
        $loss || fail "the loss did not fall: $loss"
    say "loss ${loss/ / -> } over 3 runs and $max_update updates"
}

# One job at a time: each takes all GPUs of both nodes, and other jobs of this user beside it.
submit_benchmarks() {
    ladder=$work/ladder
    NPROC_PER_NODE=2 scripts/slurm/submit_ladder.sh --gpus 4 --gpus-per-node 2 --tiny --updates 2 \
        --results "$ladder" -- --exclusive=user --cpus-per-task 2 --time 5 >"$work/ladder.log" 2>&1 ||
        fail "the ladder was not submitted: $(cat "$work/ladder.log")"
    mapfile -t ladder_jobs < <(grep -oP '^Submitted batch job \K\d+' "$work/ladder.log")
    ((${#ladder_jobs[@]} == 4)) || fail "the ladder has ${#ladder_jobs[@]} jobs instead of 4"
}

check_benchmarks() {
    local name job log
    for job in "${ladder_jobs[@]}"; do
        ended_well "$job" 240 "benchmark $(field "$job" JobName)"
    done
    for log in "$ladder"/*.log; do
        grep -q 'launch: 4 ranks on 2 nodes' "$log" || fail "$log: not on 2 x 2 ranks"
    done
    for name in layer alltoall alltoall-unbound train; do
        python -m json.tool "$ladder/$name-4.json" /dev/null || fail "it wrote no $name-4.json"
    done
    python -c 'import json, sys; r = json.load(open(sys.argv[1]))
sys.exit((r["world_size"], r["settings"]["experts"], sorted(r["results"])) != (4, 4, ["dense", "moe"]))
' "$ladder/train-4.json" || fail "train-4.json is not of 4 ranks with an expert each"
    $(grep -oP '^figures: \K.*' "$work/ladder.log") >"$work/figures.log" 2>&1 || fail "no figures"
    (($(grep -c '^'"$ladder"'/figures/claims-.*\.png$' "$work/figures.log") >= 5)) || fail "5 figures"
    say "the ladder's points are in $(grep -c 'png$' "$work/figures.log") figures"
}

check_time_limit_job() {
    ended_well "$limit_job" 180 "the job with a time limit"
    [ "$(field "$limit_job" Restarts)" = 1 ] || fail "it was not requeued once"
    say "SLURM's own signal before the time limit had it requeued"
}

# Ranks that srun started itself are adopted, and one rank's death ends those on the other node.
check_adopted_ranks() {
    local output status=0 begin=$SECONDS
    output=$(srun --nodes 2 --ntasks-per-node 2 --time 1 python -m fairseq_tutel.launch -- \
        bash -c 'echo "rank $RANK of $WORLD_SIZE is $LOCAL_RANK on $SLURMD_NODENAME"' 2>/dev/null)
    [ "$(sort <<<"$output")" = "rank 0 of 4 is 0 on virtual1
rank 1 of 4 is 1 on virtual1
rank 2 of 4 is 0 on virtual2
rank 3 of 4 is 1 on virtual2" ] || fail "srun's ranks were not adopted: $output"
    srun --nodes 2 --ntasks-per-node 2 --time 2 python -m fairseq_tutel.launch -- \
        bash -c '[ $RANK = 2 ] && { sleep 1; exit 7; }; exec sleep 100' \
        >"$work/death.log" 2>&1 || status=$?
    ((status != 0 && SECONDS - begin < 90)) || fail "one rank's death did not end the others"
    grep -q 'rank 2 ended with exit code 7' "$work/death.log" || fail "no word of the dead rank"
    say "srun's own ranks are adopted, and one rank's death ends all"
}

# An error on one node is reported, and the other node does not wait for it.
check_unlike_nodes() {
    local begin=$SECONDS
    srun --nodes 2 --ntasks-per-node 1 --time 2 bash -c 'exec python -m fairseq_tutel.launch \
        --nproc-per-node $((2 + SLURM_NODEID)) -- sleep 100' >"$work/differ.log" 2>&1 &&
        fail "nodes with 2 and 3 ranks were started"
    grep -q 'the nodes do not fit together: node . expects [46] ranks of sleep' "$work/differ.log" ||
        fail "no word of how the nodes differ: $(cat "$work/differ.log")"
    srun --nodes 2 --ntasks-per-node 1 --time 2 bash -c 'exec python -m fairseq_tutel.launch \
        --nproc-per-node 2 $( ((SLURM_NODEID)) && echo --bind 9999) -- sleep 100' \
        >"$work/one_node.log" 2>&1 && fail "a node with a wrong option was started"
    grep -q 'launch: error on .*--bind 9999' "$work/one_node.log" ||
        fail "no report of one node's error: $(cat "$work/one_node.log")"
    ((SECONDS - begin < 90)) || fail "an error on one node took $((SECONDS - begin)) s to end the job"
    say "nodes that differ, and an error on one of them, end the job with a message"
}

max_update=150
cd "$root"
mkdir -p runs
relative_directory=$(mktemp -d runs/slurm_test.XXXXXX)
start_cluster
submit_time_limit_job
submit_training
check_adopted_ranks
check_unlike_nodes
submit_benchmarks
submit_hydra_training
check_training
check_time_limit_job
check_benchmarks
check_hydra_training
