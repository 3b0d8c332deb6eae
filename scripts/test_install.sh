#!/usr/bin/env bash
# Builds the wheel and the sdist, and tries them with several versions of Python and torch: the layer
# alone from the sdist, then the wheel with fairseq-fixed and the quickstart's first 20 updates.
# Prints a row per pair for the table of the install page. Not part of continuous integration: most
# builds of torch are those for GPUs, 5 GB each.
#
#   bash scripts/test_install.sh                  # all pairs
#   bash scripts/test_install.sh 3.11/2.13.0      # some
#
# Environments are made once, in $WORK (default: build/install), with the interpreters pythonX.Y of
# $PATH or of pyenv. Wheels in $WORK/wheels are taken before those of the package index. $RUN is put
# before the command of the quickstart, such as nice; "true" leaves it out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT="$PWD" WORK="${WORK:-$PWD/build/install}"
PAIRS=(3.10/2.5.1 3.11/2.8.0 3.11/2.13.0 3.12/2.11.0 3.12/2.13.0)
[ $# = 0 ] || PAIRS=("$@")
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
mkdir -p "$WORK/wheels"

interpreter() {
    local found
    for found in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python "$(command -v "python$1")"; do
        [ -x "$found" ] && "$found" -c '' 2>/dev/null && echo "$found" && return
    done
}

build() { # with the interpreter $1, from the files that git knows
    rm -rf "$WORK/source" "$WORK/dist"
    mkdir -p "$WORK/source"
    git ls-files -z | xargs -0 cp --parents -P -t "$WORK/source"
    (cd "$WORK/source" && "$1" setup.py --quiet sdist --dist-dir "$WORK/dist" \
        bdist_wheel --dist-dir "$WORK/dist")
}

readme_layer() { # README's first Python example
    awk '/^```python$/ { inside = 1; next } /^```$/ && inside { exit } inside' "$ROOT/README.md"
}

try_pair() {
    local version="${1%/*}" torch="${1#*/}" venv pip folder python
    venv="$WORK/py$version-torch$torch" pip="$WORK/py$version-torch$torch/bin/pip"
    python="$(interpreter "$version")"
    [ -n "$python" ] || { echo "no Python $version here"; return 1; }
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    echo "torch==$torch" >"$venv/constraints.txt"
    "$pip" install --quiet -c "$venv/constraints.txt" torch setuptools wheel cython "numpy<2"
    [ -n "$(ls "$WORK"/dist/*.whl 2>/dev/null)" ] || build "$venv/bin/python"

    folder="$(mktemp -d)" # nothing of this checkout is beside what runs
    "$pip" uninstall --quiet --yes fairseq_tutel
    "$pip" install --quiet --no-build-isolation --no-deps "$WORK"/dist/*.tar.gz
    readme_layer >"$folder/layer.py"
    (cd "$folder" && "$venv/bin/python" layer.py)

    "$pip" uninstall --quiet --yes fairseq_tutel
    PIP_FIND_LINKS="$WORK/wheels" "$pip" install --quiet --no-build-isolation \
        -c "$venv/constraints.txt" "$(echo "$WORK"/dist/*.whl)[fairseq,quickstart]"
    "$pip" uninstall --quiet --yes torchaudio
    (cd "$folder" && "$venv/bin/python" -c 'import fairseq_tutel; fairseq_tutel.register()')
    cp -r "$ROOT/scripts" "$folder/scripts"
    # a short text, because what is tried is not the training
    (cd "$folder" && PATH="$venv/bin:$PATH" ${RUN:-} python scripts/quickstart/main.py \
        --updates 20 --out out "$ROOT/fairseq_tutel/integrations")
    rm -rf "$folder"
}

rm -rf "$WORK/dist"
rows=()
for pair in "${PAIRS[@]}"; do
    echo "== Python ${pair%/*}, torch ${pair#*/}"
    set +e # an error ends try_pair only outside of conditions
    (set -e; try_pair "$pair")
    result="$([ $? = 0 ] && echo passed || echo failed)"
    set -e
    rows+=("| ${pair%/*} | ${pair#*/} | $result |")
done
printf '%s\n' "| Python | torch | sdist, layer; wheel, quickstart's 20 updates |" "|---|---|---|" "${rows[@]}"
[[ "${rows[*]}" != *failed* ]]
