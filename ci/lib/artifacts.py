# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reads cargo's JSON messages; prints DESTINATION<tab>PATH for each artefact that the guest needs."""

import json
import os
import pathlib
import subprocess
import sys

LINK = pathlib.Path(__file__).parents[2] / "libibgda/link-shared"
FOLDERS = {"bin": "bin", "example": "bin", "test": "tests"}


def shared(archive):
    """The shared library of a static one, linked again only when that is newer: what is staged stays the same file."""
    folder = pathlib.Path(archive).parent / "shared"
    made = folder / "libibgda.so.0"
    newest = max(os.stat(path).st_mtime for path in (archive, LINK, LINK.with_name("libibgda.map")))
    if not made.exists() or made.stat().st_mtime <= newest:
        subprocess.run([LINK, archive, folder], check=True)
    return [made, folder / "libibgda.so"]


for line in sys.stdin:
    message = json.loads(line)
    if message.get("reason") != "compiler-artifact":
        continue
    target = message["target"]
    folder = FOLDERS.get(target["kind"][0])
    if "staticlib" in target["kind"]:
        for path in message["filenames"]:
            # Built as a dependency of a test it lies in deps/ only; the library's own build copies it up.
            if path.endswith("/libibgda.a") and "/deps/" not in path:
                for library in shared(path):
                    print(f"lib/{os.path.basename(library)}\t{library}")
    elif folder == "tests" and "/ci/vmtests/" not in message["manifest_path"]:
        continue
    elif folder and message.get("executable"):
        print(f"{folder}/{target['name']}\t{message['executable']}")
