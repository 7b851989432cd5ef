# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reads cargo's JSON messages; prints DESTINATION<tab>PATH for each artefact that the guest needs."""

import json
import os
import sys

FOLDERS = {"bin": "bin", "example": "bin", "test": "tests"}

for line in sys.stdin:
    message = json.loads(line)
    if message.get("reason") != "compiler-artifact":
        continue
    target = message["target"]
    folder = FOLDERS.get(target["kind"][0])
    if "cdylib" in target["kind"]:
        for path in message["filenames"]:
            # Built as a dependency of a test it lies in deps/ only; the library's own build copies it up.
            if path.endswith(".so") and "/deps/" not in path:
                print(f"lib/{os.path.basename(path)}\t{path}")
    elif folder == "tests" and "/ci/vmtests/" not in message["manifest_path"]:
        continue
    elif folder and message.get("executable"):
        print(f"{folder}/{target['name']}\t{message['executable']}")
