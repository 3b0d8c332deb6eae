"""How the tests start fairseq's commands where it was installed with ``pip --target``."""

import sys

from helpers.commands import ROOT, fairseq_command


def test_without_console_scripts_its_modules_are_run(tmp_path, monkeypatch):
    """And the folder that fairseq comes from stays on the path."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH $*"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    for before, path in (("", f"{ROOT}"), ("/some/site", f"{ROOT}:/some/site")):
        monkeypatch.setenv("PYTHONPATH", before)
        text = fairseq_command("fairseq-eval-lm", ["data", "--cpu"], tmp_path)
        assert text == f"{path} -m fairseq_cli.eval_lm data --cpu\n"
    script = tmp_path / "fairseq-eval-lm"
    script.write_text('#!/bin/sh\necho "script $*"\n')
    script.chmod(0o755)
    assert fairseq_command("fairseq-eval-lm", ["data"], tmp_path) == "script data\n"
