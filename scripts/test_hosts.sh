#!/usr/bin/env bash
# Golden, resume, launch, evaluation and Hydra tests on the fairseq that many people have: the
# official release 0.12.2 with torch 2.5.1 on Python 3.10. Makes .venv-official for it (5 GB: its
# torch is the one for GPUs), hence not part of continuous integration. Arguments go to pytest:
#
#   bash scripts/test_hosts.sh
#   FAIRSEQ=fixed PYTHON=/path/to/python3.12 bash scripts/test_hosts.sh    # in .venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export FAIRSEQ="${FAIRSEQ:-official}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
source scripts/setup_env.sh

python - <<'END'
import platform
from importlib.metadata import distributions

names = ("torch", "fairseq", "fairseq-fixed", "hydra-core", "omegaconf")
found = {each.metadata["Name"]: each.version for each in distributions()}
versions = [f"{name} {found[name]}" for name in names if name in found]
print(f"Python {platform.python_version()}", *versions, sep=", ", flush=True)
END
exec python -m pytest -n "${TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder \
    tests/integrations/fairseq/test_{golden,resume,requeue,start,errors}.py tests/e2e/test_programs.py \
    tests/launch/test_{launch_commands,launch_processes,hydra_directory}.py \
    tests/plan/test_{meta_config,plan_cli}.py tests/integrations/fairseq/test_model.py tests/training/test_adam16.py \
    tests/checkpoint/test_checkpoint_{golden,io}.py tests/test_versions.py "$@"
