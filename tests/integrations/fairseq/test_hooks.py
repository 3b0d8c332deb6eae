"""The table of replacements against what really changes in a process of fairseq's."""

import json

from helpers.commands import ROOT

from fairseq_tutel.integrations.fairseq.hooks import TABLE

# every attribute of every module of fairseq's, and of their classes, before and after
PROGRAM = """
import argparse, inspect, json, os, sys
sys.argv = ["fairseq-train"]
import fairseq_cli.train, fairseq_cli.eval_lm, fairseq_cli.validate, fairseq_cli.generate
import fairseq.optim.fused_adam, fairseq.hub_utils, fairseq.trainer

def attributes():
    found = {"sys.excepthook": sys.excepthook}
    for name in ("error", "format_help"):
        found[f"argparse.ArgumentParser.{name}"] = getattr(argparse.ArgumentParser, name)
    found["fairseq.trainer.Trainer.__new__"] = fairseq.trainer.Trainer.__new__  # inherited before
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("fairseq", "fairseq_cli") or module.__name__ != name:
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = value
            if inspect.isclass(value) and value.__module__ == name:
                for member, code in list(vars(value).items()):
                    found[f"{name}.{key}.{member}"] = code
    return found

before = attributes()
import fairseq_tutel
fairseq_tutel.register()
after = attributes()
changed = [k for k in before if k in after and after[k] is not before[k]]
print(json.dumps(changed), flush=True)
os._exit(0)
"""


def test_the_table_names_all_that_is_replaced(programs):
    done = programs.run(["fairseq-train"], prelude=PROGRAM)  # in its place
    changed = json.loads(done.stdout.splitlines()[-1])
    assert sorted(changed) == sorted(TABLE), changed


def test_the_page_counts_the_rows():
    text = (ROOT / "fairseq_tutel/integrations/fairseq/README.md").read_text(encoding="utf-8")
    assert f"{len(TABLE)} attributes" in " ".join(text.split())
