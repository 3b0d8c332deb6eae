#!/usr/bin/env bash
# Makes .venv in the repository and installs what scripts/constraints.txt pins, and this package
# (editable) into it; at once where that is done already. Sourced by test.sh and quickstart.sh,
# which then find the environment first in PATH; may be called by itself, too.
#
#   PYTHON=/path/to/python3.12 bash scripts/setup_env.sh    # another interpreter (3.11 or newer)
#
# What is needed beforehand: Python with venv, pip and its headers, and a C++ compiler.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
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

# Whether version $1 is 3.11 or newer.
setup_new_enough() {
    case "$1" in
        "" | 2.* | 3.[0-9].* | 3.10.*) return 1 ;;
    esac
}

# Prints the interpreter to use: $PYTHON; else one of the versions that fairseq-fixed was tried
# with; else python3.
setup_interpreter() {
    local candidate version
    for candidate in python3.11 python3.12; do
        if [ -z "${PYTHON:-}" ] && "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    candidate="${PYTHON:-python3}"
    version="$(setup_version "$candidate")" || version=""
    setup_new_enough "$version" ||
        setup_fail "Python 3.11 or newer is needed, and $candidate is" \
            "${version:-not to be found or does not start}; choose one with" \
            "PYTHON=/path/to/python3.11"
    command -v "$candidate"
}

setup_check_tools() {
    local compiler="${CXX:-c++}"
    "$1" -c 'import ensurepip, venv' 2>/dev/null ||
        setup_fail "$1 has no complete venv module (Debian, Ubuntu: apt install python3-venv)"
    "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
        setup_fail "$1 has no headers (Debian, Ubuntu: apt install python3-dev)"
    command -v "${compiler%% *}" >/dev/null ||
        setup_fail "a C++ compiler is needed, and $compiler was not found" \
            "(Debian, Ubuntu: apt install g++); choose another with CXX=..."
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
        -c "$ROOT/scripts/constraints.txt" "$@"
}

# Built against the torch that is there: without --no-build-isolation pip would fetch a second one
# for the build. Without CUDA_HOME fairseq leaves out CUDA extensions that nothing here uses.
setup_fairseq() (
    unset CUDA_HOME
    export MAX_JOBS="${MAX_JOBS:-$(nproc)}"
    setup_pip --no-build-isolation fairseq-fixed hydra-core omegaconf
)

# Editable, and linked: fairseq looks for a --user-dir in the working directory and beside itself in
# site-packages, where an editable install leaves nothing. (Hydra changes the working directory.)
setup_this_package() {
    local packages
    setup_pip --no-deps --no-build-isolation -e "$ROOT" || return
    packages="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
    ln -sfn "$ROOT/fairseq_tutel" "$packages/fairseq_tutel"
}

setup_install() {
    setup_step "torch" setup_pip torch
    setup_step "build tools" setup_pip setuptools wheel cython numpy ninja packaging
    setup_step "fairseq (compiled here, the longest step)" setup_fairseq
    setup_step "triton, sentencepiece, matplotlib, pytest, ruff" \
        setup_pip triton sentencepiece matplotlib tensorboardX pytest pytest-timeout pytest-xdist \
        ruff
    setup_step "this package" setup_this_package
}

setup_main() {
    local python version made_with installed
    installed="$(cat "$ROOT/scripts/constraints.txt" "$ROOT/scripts/setup_env.sh" \
        "$ROOT/setup.py" | cksum)"
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
    [ "$python" != "$VENV/bin/python" ] ||
        python="$("$python" -c 'import sys; print(sys._base_executable)')"
    setup_check_tools "$python"
    if [ "$(head -n 1 "$STAMP" 2>/dev/null)" = "$made_with" ]; then
        echo "Updating .venv (what to install has changed):"
        rm -f "$STAMP"
    else
        [ ! -e "$VENV" ] || [ -e "$SETUP_LOG" ] ||
            setup_fail "$VENV is there and was not made by this script; please move it away"
        [ ! -e "$VENV" ] || echo "Removing .venv, which is unfinished, moved or of another Python."
        echo "Making .venv with Python $version, once; about 5 minutes on 2 cores and a fast network:"
        rm -rf "$VENV"
        mkdir "$VENV"
        : >"$SETUP_LOG"
        setup_step "virtual environment" "$python" -m venv "$VENV"
    fi
    setup_install
    printf '%s\n%s\n' "$made_with" "$installed" >"$STAMP"
    echo
}

# Two set-ups at once would spoil each other: the second waits here, and finds the work done.
exec 9<"$ROOT"
if command -v flock >/dev/null && ! flock --nonblock 9; then
    echo "Waiting for another set-up of .venv to end ..."
    flock 9
fi
setup_main
exec 9<&-

export VIRTUAL_ENV="$VENV" PATH="$VENV/bin:$PATH"
unset PYTHONHOME
