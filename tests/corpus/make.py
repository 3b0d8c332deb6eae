"""Record what users have: ``python tests/corpus/make.py``, in an environment with transformers.

To add a form of this commit: save its files in a folder, by a program as users have it, and pack
them (``--pack FOLDER``, as ``files_COMMIT.tar.xz``). Append a page's program to ``snippets.txt``.
Add a line to ``entries.json``, and a reader if none fits. Then this program writes the values of
entries without one. To record an entry again, remove its value; compare both.

This program at e821d35 has what saved ``files.tar.xz``, on a CPU with torch 2.13. ``user_dir``,
``configs`` and ``data_381b71b`` were written by hand or by an older commit.
"""

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import test_what_users_have as test  # noqa: E402


def pack(folder):
    """Write an archive; the same files give the same bytes."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, cwd=HERE, check=True, capture_output=True, text=True).stdout
    with tarfile.open(HERE / f"files_{commit.strip()}.tar.xz", "x:xz", preset=9) as archive:
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            member = tarfile.TarInfo(str(path.relative_to(folder)))
            member.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(member, file)


def record():
    """Write what the readers return now for entries without a value."""
    names = [name for name, entry in test.ENTRIES.items() if "value" not in entry]
    failed = ""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "files")
        test.unpack(files)
        got: dict = {}
        for name in names:
            if name not in got:
                got |= test.read(files, name, names)
    for name, value in got.items():
        if isinstance(value, test.Failure):
            failed += f"{name}: {value.text}\n"
        else:
            test.ENTRIES[name]["value"] = value
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in test.ENTRIES.items()]
    (HERE / "entries.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    sys.exit(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pack", metavar="FOLDER", help="first pack the files of new entries")
    if folder := parser.parse_args().pack:
        pack(folder)
    record()
