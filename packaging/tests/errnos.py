# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares the errnos of each ioctl in docs/man/ibgda.4 with those of the comments in uapi/ibgda.h: the same ones, in the same
order, for each command; and those that kmod/ can return are all there."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ERRNO = re.compile(r"\bE[A-Z0-9]{3,}\b")
# What the comments call by name without meaning an errno.
WORDS = {"EVENTFD", "EVENTS"}


def of_header():
    text = (ROOT / "uapi/ibgda.h").read_text()
    commands = {}
    for comment in re.findall(r"/\*\*(.*?)\*/", text, re.S):
        lines = " ".join(line.strip(" *") for line in comment.splitlines())
        first = re.search(r"struct \w+ - (.*)", lines)
        names = re.findall(r"IBGDA_IOC_(\w+)", lines.split(":")[0]) if first else []
        if names == ["BIND"] or "IBGDA_IOC_BIND, IBGDA_IOC_REBIND" in lines:
            bind, rebind = re.search(r"BIND: (EINVAL.*?) REBIND: (.*)", lines).groups()
            commands["BIND"], commands["REBIND"] = ERRNO.findall(bind), ERRNO.findall(rebind)
        elif names:
            commands[names[0]] = [e for e in ERRNO.findall(lines) if e not in WORDS]
    return commands


def of_manual():
    commands = {}
    name = None
    for line in (ROOT / "docs/man/ibgda.4").read_text().splitlines():
        if line.startswith(".Ss "):
            found = re.fullmatch(r"\.Ss IBGDA_IOC_(\w+)", line)
            name = found and found[1]
        if name:
            commands.setdefault(name, [])
            if line.startswith(".It Er "):
                commands[name] += ERRNO.findall(line)
    return commands


def of_module():
    found = set()
    for path in ("device", "session", "doorbell", "queue", "mapping", "events", "grant", "owner", "pci", "abi"):
        found |= set(re.findall(r"\b(?:Err\(|ok_or\(|\|_\| |\(_\) => |=> )(E[A-Z]{3,})\b", (ROOT / f"kmod/{path}.rs").read_text()))
    return found


def unify(errnos):
    """Neighbours that are the same count once: the one text may split what the other says together."""
    return [e for i, e in enumerate(errnos) if i == 0 or errnos[i - 1] != e]


header, manual = of_header(), of_manual()
bad = 0
for name in sorted(set(header) | set(manual)):
    ours, theirs = unify(manual.get(name, [])), unify(header.get(name, []))
    if ours != theirs:
        print(f"{name}: the manual has {ours}, the header {theirs}")
        bad = 1
if len(header) != 10:
    print(f"the header documents {sorted(header)}: ten commands were expected")
    bad = 1
text = (ROOT / "docs/man/ibgda.4").read_text()
# ENOSPC: after 2^51 pages of offsets; ENODEV of the grant table: while the module is being unloaded, when no file is open.
for errno in sorted(of_module() - {"ENOSPC"}):
    if errno not in text:
        print(f"kmod/ returns {errno}, of which docs/man/ibgda.4 knows nothing")
        bad = 1
sys.exit(bad)
