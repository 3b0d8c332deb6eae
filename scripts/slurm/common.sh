# shellcheck shell=bash
# Functions shared by the batch scripts of this folder; sourced, not run.
#
# Environment that all of them read:
#   REPO            checkout of this project (default: the directory sbatch was called in)
#   ENV_SETUP       file to source on the first node before anything else, for modules, conda or a
#                   virtual environment; what it exports reaches all nodes
#                   (default: $REPO/.venv/bin/activate where that exists)
#   NPROC_PER_NODE  ranks per node (default: auto, one per GPU)
#   LAUNCH_OPTIONS  more options for python -m fairseq_tutel.launch, e.g. "--bind none" or
#                   "--nccl-profile ib-adaptive-routing"

# The comment at the top of the calling script is its help text.
usage() {
    sed -n '2,/^[^#]/{/^#\( \|$\)/s/^# \{0,1\}//p}' "$1"
    sed -n '/^# Environment that all/,/^$/s/^# \{0,1\}//p' "$(dirname "$1")/common.sh"
}

# Enters the checkout and its Python environment.
enter_environment() {
    cd "${REPO:-${SLURM_SUBMIT_DIR:-.}}" || exit 2
    if [ ! -f fairseq_tutel/launch/__main__.py ]; then
        echo "no checkout of fairseq_tutel in $PWD: call sbatch there, or set REPO" >&2
        exit 2
    fi
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
    local setup=${ENV_SETUP:-.venv/bin/activate}
    if [ -n "${ENV_SETUP:-}" ] || [ -f "$setup" ]; then
        # shellcheck disable=SC1090
        source "$setup" || exit 2
    fi
}

# launch COMMAND ...: runs COMMAND on all ranks of the job and returns its exit code.
#
# One task per node, with all of the node's cores: the launcher starts that node's ranks and binds
# them. Not --kill-on-bad-exit: launchers whose ranks have saved leave one by one, the first node's
# with code 85; when a rank fails, its launcher ends the step. --wait ends a step that still hangs,
# after 10 minutes. A signal to this shell is passed on, and the wait for the ranks goes on.
#
# SIGUSR1 goes to the ranks of this node, and they tell the others. The launcher of this node keeps
# their process numbers in a folder that is made here; ranks that are not there yet find the request
# in it. Other launchers' Python begins with the signal ignored, which would end it.
launch() {
    local step status=127 now interrupted=1
    FAIRSEQ_TUTEL_FOLDER=$(mktemp -d) && export FAIRSEQ_TUTEL_FOLDER || return
    # shellcheck disable=SC2086
    srun --ntasks-per-node=1 --ntasks="$SLURM_JOB_NUM_NODES" \
        --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none \
        --kill-on-bad-exit=0 --wait=600 \
        sh -c 'trap "" USR1; exec "$@"' launch \
        python -m fairseq_tutel.launch --nproc-per-node "${NPROC_PER_NODE:-auto}" \
        ${LAUNCH_OPTIONS:-} -- "$@" &
    step=$!
    trap 'pass_on_usr1; interrupted=1' USR1
    trap 'kill -TERM $step; interrupted=1' TERM
    ((${usr1_came:-0})) && pass_on_usr1
    # A signal ends `wait`, too; bash keeps the code of a step that ended meanwhile for the next.
    while ((interrupted)); do
        interrupted=0
        wait "$step"
        now=$?
        ((now == 127)) || status=$now # 127: was waited for already
    done
    trap '' USR1 # it was the ranks'
    trap - TERM
    rm -rf "$FAIRSEQ_TUTEL_FOLDER"
    return "$status"
}

pass_on_usr1() {
    local pid
    touch "$FAIRSEQ_TUTEL_FOLDER/requested"
    for pid in "$FAIRSEQ_TUTEL_FOLDER"/pids/*; do
        kill -USR1 "${pid##*/}"
    done
} 2>/dev/null
