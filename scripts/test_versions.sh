#!/usr/bin/env bash
# Compares the logits of all models of several versions of transformers before and after replace_moe,
# and prints how many are the same. From 5.23 on, which MoETrainer needs, it also runs the tests.
# Not part of continuous integration.
#
#   bash scripts/test_versions.sh                                 # all of VERSIONS
#   VERSIONS="5.0.0 5.24.0" bash scripts/test_versions.sh
#   VERSIONS=5.24.0 bash scripts/test_versions.sh -k trainer      # arguments go to pytest
#
# Each version is installed once, with what it requires, in .venv-transformers/VERSION, which comes
# before .venv-extras. $PYTHON: the interpreter of another environment with torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VERSIONS="${VERSIONS:-5.0.0 5.5.4 5.6.2 5.10.4 5.23.0 5.24.0}"
PYTHON="${PYTHON:-$PWD/.venv-extras/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

failed=""
for version in $VERSIONS; do
    target="$PWD/.venv-transformers/$version"
    if [ ! -e "$target/installed" ]; then
        "$PYTHON" -m pip install --quiet --target "$target" "transformers==$version"
        touch "$target/installed"
    fi
    export PYTHONPATH="$target:$PWD"
    echo "transformers $version"
    "$PYTHON" tests/integrations/transformers/models_page.py --verdicts 2>/dev/null || failed+=" $version"
    [ "$(printf '%s\n' 5.23 "$version" | sort -V | head -n 1)" = 5.23 ] || continue
    # but for the page's table, which is of one version
    "$PYTHON" -m pytest -q -n 0 -m extras tests/integrations/transformers \
        --deselect tests/integrations/transformers/test_models.py::test_the_page_lists_all_folders_with_their_verdicts \
        "$@" || failed+=" $version"
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
