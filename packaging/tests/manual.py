# SPDX-License-Identifier: MIT OR Apache-2.0
"""What can be said of docs/man/ without mandoc, which the root file system lacks: macros that exist, blocks that are closed,
the sections that every page has, and references to pages that are there."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2] / "docs/man"
MACROS = set(
    "Dd Dt Os Sh Ss Nm Nd In Bd Ed Bl El It Pp Xr Em Sy Fa Dv Er Pa Ar Op Fl Cm Li Ql Qq Pq Ic Ft Fn Vt No".split()
)
BLOCKS = {"Bd": "Ed", "Bl": "El"}
SECTIONS = ["NAME", "SYNOPSIS", "DESCRIPTION", "EXIT STATUS", "FILES", "NOTES", "SEE ALSO"]
OTHERS = {("eventfd", "2"), ("ioctl", "2"), ("mmap", "2"), ("fork", "2"), ("execve", "2"), ("poll", "2"), ("modprobe", "8"), ("modprobe.d", "5")}

bad = 0


def complain(path, number, what):
    global bad
    bad = 1
    print(f"{path.name}:{number}: {what}")


def names(page):
    head = page.read_text().partition(".Sh NAME\n")[2].partition(".Sh ")[0]
    return [page.stem] + [line.split()[1] for line in head.splitlines() if line.startswith(".Nm ")]


pages = sorted(ROOT.glob("*.[1-9]"))
# A page is found under every name that its first section has.
ours = {(name, page.suffix[1:]) for page in pages for name in names(page)}
if not pages:
    complain(ROOT, 0, "no pages")
for page in pages:
    blocks, sections, prologue = [], [], []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.isascii():
            complain(page, number, "not ASCII")
        if line != line.rstrip() or not line:
            complain(page, number, "an empty line, or spaces at the end")
        if not line.startswith(".") or line.startswith('.\\"'):
            if "\\" in line.replace("\\-", "").replace("\\e", "") and not line.startswith('.\\"'):
                complain(page, number, "an escape")
            continue
        macro, _, rest = line[1:].partition(" ")
        if macro not in MACROS:
            complain(page, number, f"no macro .{macro}")
        if macro in ("Dd", "Dt", "Os"):
            prologue.append(macro)
        if macro in BLOCKS:
            blocks.append((BLOCKS[macro], number))
        elif macro in BLOCKS.values():
            if not blocks or blocks.pop()[0] != macro:
                complain(page, number, f".{macro} closes nothing")
        elif macro == "It" and not blocks:
            complain(page, number, ".It is in no list")
        elif macro in ("Sh", "Ss") and blocks:
            complain(page, number, f"the block of line {blocks[-1][1]} is open")
        if macro == "Sh":
            sections.append(rest)
        if macro == "Dt" and rest != f"{page.stem.upper()} {page.suffix[1:]}":
            complain(page, number, f".Dt {rest}")
        if macro == "Xr":
            target = tuple(rest.split()[:2])
            if target not in ours | OTHERS or target == (page.stem, page.suffix[1:]):
                complain(page, number, f"a reference to {target}")
    if blocks:
        complain(page, number, f"the block of line {blocks[-1][1]} is open")
    if prologue != ["Dd", "Dt", "Os"]:
        complain(page, 1, "not .Dd, .Dt, .Os at its beginning")
    if [name for name in SECTIONS if name in sections] != sections or not {"NAME", "DESCRIPTION", "SEE ALSO"} <= set(sections):
        complain(page, 1, f"sections {sections}")
sys.exit(bad)
