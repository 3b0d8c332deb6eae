"""Runs fairseq's programs one after another in one process, for a server of processes.

Standard input is a JSON list of [started by the launcher, command line]. Each program's output
follows a line of its number; a last line says "ended" or has its error.
"""

import importlib
import json
import os
import sys
import traceback

import fairseq_tutel
from fairseq_tutel.launch.commands import parse_command, rank_options, with_options

PROGRAMS = ("eval_lm", "generate", "interactive", "validate")


def _words(launched, argv):
    """The command line of this rank, with what the launcher adds."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if not launched or ranks == 1:
        return argv
    command, rank = parse_command(argv), int(os.environ["RANK"])
    how = {"rank": rank, "world_size": ranks, "device": rank, "shared_node": True, "cpu": True}
    return [argv[0], *with_options(command, rank_options(command, **how))[len(command.program) :]]


def _main():
    modules = {name: importlib.import_module(f"fairseq_cli.{name}") for name in PROGRAMS}
    fairseq_tutel.register()  # --user-dir does not import it again
    for number, (launched, argv) in enumerate(json.load(sys.stdin)):
        print(f"=== {number}", flush=True)
        try:
            sys.argv = _words(launched, argv)
            modules[argv[0].removeprefix("fairseq-").replace("-", "_")].cli_main()
            print("ended", flush=True)
        except Exception as error:
            traceback.print_exc()
            print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    _main()
