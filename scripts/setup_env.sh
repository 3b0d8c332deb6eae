#!/usr/bin/env bash
# Makes .venv in the repository and installs what scripts/constraints.txt pins, and this package
# (editable) into it; at once where that is done already. Sourced by test.sh and quickstart.sh,
# which then find the environment first in PATH; may be called by itself, too.
#
#   PYTHON=/path/to/python3.12 bash scripts/setup_env.sh    # another interpreter (3.10 or newer)
#   FAIRSEQ=official bash scripts/setup_env.sh    # fairseq 0.12.2, on Python 3.10, in .venv-official
#   EXTRAS=1 bash scripts/setup_env.sh            # .venv-extras, too: .venv with other libraries
#
# FAIRSEQ=fixed, the default, is fairseq-fixed. What is needed beforehand: Python with venv, pip and
# its headers, and a C++ compiler.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
FAIRSEQ="${FAIRSEQ:-fixed}"
# The versions of Python to look for, in this order.
case "$FAIRSEQ" in
    fixed) VENV="$ROOT/.venv" CONSTRAINTS="constraints.txt" PYTHONS="3.11 3.12 3.10" ;;
    # Its config is a dataclass that Python refuses from 3.11 on (mutable defaults).
    official) VENV="$ROOT/.venv-official" CONSTRAINTS="constraints-official.txt" PYTHONS="3.10" ;;
    *) echo "setup: error: FAIRSEQ=$FAIRSEQ: choose fixed or official" >&2; exit 1 ;;
esac
CONSTRAINTS="$ROOT/scripts/$CONSTRAINTS"
SETUP_LOG="$VENV/setup.log"
# Two lines: where and with which Python it was made; what was installed. Written last, so a set-up
# that was interrupted has none.
STAMP="$VENV/setup.stamp"

setup_fail() {
    echo "setup: error: $*" >&2
    exit 1
}

setup_version() {
    "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null
}

# Prints the interpreter to use: $PYTHON; else, on PATH or among pyenv's, one of the versions that
# this fairseq was tried with; else python3.
setup_interpreter() {
    local candidate version pyenv="${PYENV_ROOT:-$HOME/.pyenv}/versions"
    for version in $PYTHONS; do
        for candidate in "python$version" "$pyenv/$version".*/bin/python; do
            if [ -z "${PYTHON:-}" ] && "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
                command -v "$candidate"
                return
            fi
        done
    done
    candidate="${PYTHON:-python3}"
    version="$(setup_version "$candidate")" || version="not to be found"
    [[ $version =~ ^3\.1[0-9]\. && ($FAIRSEQ = fixed || $version = 3.10.*) ]] ||
        setup_fail "Python 3.10 or newer is needed (3.10 for FAIRSEQ=official), and $candidate is" \
            "$version; choose one with PYTHON=/path/to/python3.10"
    command -v "$candidate"
}

setup_check_tools() {
    local compiler="${CXX:-c++}"
    "$1" -c 'import ensurepip, venv, os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' \
        2>/dev/null ||
        setup_fail "$1 lacks venv or its headers (Debian, Ubuntu: apt install python3-venv python3-dev)"
    command -v "${compiler%% *}" >/dev/null ||
        setup_fail "a C++ compiler is needed, and $compiler was not found (Debian, Ubuntu: apt" \
            "install g++); choose another with CXX=..."
}

# setup_step TITLE COMMAND...: run a command, its output in the log; show the log's end if it fails.
setup_step() {
    local title="$1" start="$SECONDS"
    shift
    printf '  %s ... ' "$title"
    if "$@" >>"$SETUP_LOG" 2>&1; then
        echo "done ($((SECONDS - start)) s)"
    else
        echo "failed"
        tail -n 25 "$SETUP_LOG" >&2
        setup_fail "the step above failed; all of its output is in $SETUP_LOG"
    fi
}

setup_pip() {
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
        -c "$CONSTRAINTS" "$@"
}

# fairseq-fixed is built against the torch that is there: without --no-build-isolation pip would
# fetch a second one for the build. The official release builds only in isolation. Neither compiles
# its CUDA extensions, which nothing here uses.
setup_fairseq() (
    unset CUDA_HOME
    export MAX_JOBS="${MAX_JOBS:-$(nproc)}"
    if [ "$FAIRSEQ" = official ]; then
        PIP_CONSTRAINT="$CONSTRAINTS" setup_pip fairseq
    else
        setup_pip --no-build-isolation fairseq-fixed hydra-core omegaconf
    fi
)

# site-packages of the environment $1.
setup_packages() {
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'
}

# Editable, and linked: fairseq looks for a --user-dir in the working directory and beside itself in
# site-packages, where an editable install leaves nothing. (Hydra changes the working directory.)
setup_this_package() {
    setup_pip --no-deps --no-build-isolation -e "$ROOT" || return
    ln -sfn "$ROOT/fairseq_tutel" "$(setup_packages "$VENV")/fairseq_tutel"
}

setup_install() {
    # pip 24.1 and newer refuse the metadata of omegaconf 2.0
    [ "$FAIRSEQ" = fixed ] || setup_step "pip" setup_pip pip
    setup_step "torch" setup_pip torch
    setup_step "build tools" setup_pip setuptools wheel cython numpy ninja packaging
    setup_step "fairseq (compiled here, the longest step)" setup_fairseq
    # which fairseq-fixed requires, for speech alone: it is of another torch and fails when imported
    [ "$FAIRSEQ" = official ] || setup_step "without torchaudio" \
        "$VENV/bin/python" -m pip uninstall --yes torchaudio
    setup_step "triton, safetensors, sentencepiece, matplotlib, num2words, pytest, ruff" \
        setup_pip triton safetensors sentencepiece matplotlib num2words tensorboardX pytest \
        pytest-timeout pytest-xdist ruff
    [ "$FAIRSEQ" = official ] || setup_step "basedpyright" setup_pip basedpyright
    setup_step "this package" setup_this_package
}

setup_main() {
    local python version made_with installed
    installed="$(cat "$CONSTRAINTS" "$ROOT/scripts/setup_env.sh" "$ROOT/setup.py" | cksum)"
    # An environment that is there is used as it is, unless $PYTHON asks for another version.
    if [ -z "${PYTHON:-}" ] && version="$(setup_version "$VENV/bin/python")"; then
        python="$VENV/bin/python"
    else
        python="$(setup_interpreter)"
        version="$(setup_version "$python")"
    fi
    made_with="$ROOT Python $version"
    if [ "$(cat "$STAMP" 2>/dev/null)" = "$made_with"$'\n'"$installed" ] &&
        setup_version "$VENV/bin/python" >/dev/null; then
        return
    fi

    # Not .venv's own interpreter, which may be about to be removed.
    [ "$python" != "$VENV/bin/python" ] || python="$(realpath "$python")"
    setup_check_tools "$python"
    if [ "$(head -n 1 "$STAMP" 2>/dev/null)" = "$made_with" ]; then
        echo "Updating ${VENV##*/} (what to install has changed):"
        rm -f "$STAMP"
    else
        [ ! -e "$VENV" ] || [ -e "$SETUP_LOG" ] ||
            setup_fail "$VENV is there and was not made by this script; please move it away"
        [ ! -e "$VENV" ] ||
            echo "Removing ${VENV##*/}, which is unfinished, moved or of another Python."
        echo "Making ${VENV##*/} with Python $version, once;" \
            "about 5 minutes on 2 cores and a fast network:"
        rm -rf "$VENV"
        mkdir "$VENV"
        : >"$SETUP_LOG"
        setup_step "virtual environment" "$python" -m venv "$VENV"
    fi
    setup_install
    printf '%s\n%s\n' "$made_with" "$installed" >"$STAMP"
    echo
}

# Libraries that some tests compare with or are hosts of (scripts/constraints-extras.txt), in an
# environment that sees all of .venv: versions that they demand stay out of it.
setup_extras() {
    local packages stamp wanted
    VENV="$ROOT/.venv-extras" SETUP_LOG="$ROOT/.venv-extras/setup.log"
    stamp="$VENV/setup.stamp"
    wanted="$(cat "$STAMP" "$ROOT/scripts/constraints-extras.txt" | cksum)"
    [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
    packages="$(setup_packages "$ROOT/.venv")"
    echo "Making .venv-extras, once:"
    rm -rf "$VENV"
    mkdir "$VENV"
    : >"$SETUP_LOG"
    setup_step "virtual environment" "$ROOT/.venv/bin/python" -m venv "$VENV"
    echo "$packages" >"$(setup_packages "$VENV")/all_of_venv.pth"
    setup_step "transformers" \
        setup_pip -c "$ROOT/scripts/constraints-extras.txt" transformers
    # alone: each requires some torch, and Lightning and datasets what they download with
    setup_step "accelerate, lightning, peft, trl" setup_pip -c "$ROOT/scripts/constraints-extras.txt" \
        --no-deps accelerate psutil lightning-fabric lightning-utilities peft pytorch-lightning \
        torchmetrics trl datasets dill multiprocess pandas pyarrow pytz xxhash
    # from source; its operators are compiled when they are used
    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu setup_step "deepspeed" setup_pip --no-build-isolation --no-deps \
        -c "$ROOT/scripts/constraints-extras.txt" deepspeed einops hjson msgpack py-cpuinfo
    # what they require besides torch is there by now; in a folder of their own, since transformers
    # imports a torchvision that it finds, also one that does not fit the torch
    setup_step "timm, torchvision" setup_pip -c "$ROOT/scripts/constraints-extras.txt" --no-deps \
        --target "$VENV/vision" timm torchvision
    echo "$wanted" >"$stamp"
    echo
}

# Two set-ups at once would spoil each other: the second waits here, and finds the work done.
exec 9<"$ROOT"
if command -v flock >/dev/null && ! flock --nonblock 9; then
    echo "Waiting for another set-up to end ..."
    flock 9
fi
setup_main
[ -z "${EXTRAS:-}" ] || setup_extras
exec 9<&-

# .venv-extras has no console scripts of its own
export VIRTUAL_ENV="$VENV" PATH="$VENV/bin:${STAMP%/*}/bin:$PATH"
unset PYTHONHOME
