#!/usr/bin/env bash
# Golden runs, translation, resume, launch, evaluation and Hydra tests on the fairseqs that people
# have. Not part of continuous integration: it makes environments. Other arguments go to pytest:
#
#   bash scripts/test_hosts.sh                              # all; those without a clone are skipped
#   HOSTS="official main" MAIN=/clones/fairseq bash scripts/test_hosts.sh
#   HOSTS=fixed PYTHON=/path/to/python3.12 bash scripts/test_hosts.sh      # in .venv
#
# | host        | what it is                                | environment    | clone of it in  |
# |-------------|-------------------------------------------|----------------|-----------------|
# | fixed       | fairseq-fixed                             | .venv          |                 |
# | official    | official release 0.12.2, on Python 3.10   | .venv-official |                 |
# | main        | facebookresearch/fairseq at 3d262bb       | .venv-official | $MAIN           |
# | one-sixth   | One-sixth/fairseq at 4480043              | .venv          | $ONE_SIXTH      |
# | varun-gumma | VarunGumma/fairseq at f6cd0f7             | .venv          | $VARUN_GUMMA    |
#
# A clone is compiled in a folder of its own in the environment, and comes before what is installed
# there. $RUN is put before what computes, such as nice.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
HOSTS="${HOSTS:-${FAIRSEQ:-fixed official main one-sixth varun-gumma}}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MAX_JOBS="${MAX_JOBS:-$(nproc)}"
TESTS=(tests/integrations/fairseq/test_{golden,golden_translation,equivalence,requeue,start,errors,model}.py
    tests/e2e/test_{programs,translation}.py tests/plan/test_plan_{any_model,cli}.py
    tests/launch/test_launch_{job,processes}.py
    tests/training/test_adam16.py tests/checkpoint/test_{checkpoint_files,metas_files}.py tests/test_versions.py)
[ -z "${ONLY:-}" ] || read -ra TESTS <<<"$ONLY"

# Prints the folder of a host's source: $1 its clone, $2 a commit of it.
compiled() {
    local folder="$VENV/hosts/$2"
    [ -d "$folder" ] || { mkdir -p "$folder" && git -C "$1" archive "$2" | tar -x -C "$folder"; }
    [ -e "$folder/compiled" ] || (
        cd "$folder"
        unset CUDA_HOME # none of its CUDA extensions are used
        # VarunGumma's asks for the name of a GPU as it is imported
        sed -i 's/^device_name = torch.cuda.get_device_name(0)/device_name = ""/' \
            fairseq/{optim/adam,modules/layer_norm}.py
        ${RUN:-} python setup.py --quiet build_ext --inplace >&2 && touch compiled
    ) || return
    # fairseq looks beside itself for a --user-dir, as Hydra changes the working directory
    ln -sfn "$ROOT/fairseq_tutel" "$folder/fairseq_tutel"
    echo "$folder"
}

try_host() { # environment, clone, commit
    export FAIRSEQ="$1"
    source scripts/setup_env.sh
    if [ -n "$2" ]; then
        # what newer ones than the official release import
        setup_pip --quiet -c scripts/constraints-extras.txt scikit-learn einops
        PYTHONPATH="$(compiled "$2" "$3")"
        export PYTHONPATH
    fi
    python - <<'END'
import platform
from importlib.metadata import distributions

import fairseq

names = ("torch", "fairseq", "fairseq-fixed", "hydra-core", "omegaconf")
found = {each.metadata["Name"]: each.version for each in distributions()}
versions = [f"{name} {found[name]}" for name in names if name in found]
print(f"Python {platform.python_version()}", *versions, fairseq.__file__, sep=", ", flush=True)
END
    ${RUN:-} python -m pytest -n "${TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder \
        "${TESTS[@]}" "${PYTEST[@]}"
}

PYTEST=("$@") failed=""
for host in $HOSTS; do
    case "$host" in
    fixed | official) setting=("$host" "" "") ;;
    main) setting=(official "${MAIN:-}" 3d262bb) ;;
    one-sixth) setting=(fixed "${ONE_SIXTH:-}" 4480043) ;;
    varun-gumma) setting=(fixed "${VARUN_GUMMA:-}" f6cd0f7) ;;
    *) echo "no host $host" >&2; exit 2 ;;
    esac
    if [ -n "${setting[2]}" ] && [ -z "${setting[1]}" ]; then
        name="${host^^}"
        echo "== $host: skipped; give a clone of it by ${name//-/_}=/path/to/clone"
        continue
    fi
    echo "== $host"
    set +e # an error ends try_host only outside of conditions
    (set -e; try_host "${setting[@]}")
    [ $? = 0 ] || failed+=" $host"
    set -e
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
