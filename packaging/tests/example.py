# SPDX-License-Identifier: MIT OR Apache-2.0
"""Prints the program of docs/man/libibgda.3 as who copies it from the page has it."""

import pathlib

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/man/libibgda.3"
program = PAGE.read_text().partition(".Sh NOTES")[2].partition(".Bd -literal\n")[2].partition(".Ed\n")[0]
print(program.replace(".Pp\n", "\n").replace("\\e", "\\"), end="")
