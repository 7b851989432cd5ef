# SPDX-License-Identifier: MIT OR Apache-2.0
"""abi.py against uapi/ibgda.h, by the C compiler: each structure, field and number, and none left out.

    ci/enter python3 examples/python-ioctl/layout_test.py
"""

import ctypes
import pathlib
import re
import subprocess
import unittest

import abi

HEADER = pathlib.Path(__file__).resolve().parents[2] / "uapi/ibgda.h"
TEXT = HEADER.read_text()


def structures():
    return {
        name: value
        for name, value in vars(abi).items()
        if name.startswith("ibgda_") and issubclass(value, abi.Structure)
    }


def numbers():
    return {name: value for name, value in vars(abi).items() if name.startswith("IBGDA_")}


def claims(structures, numbers):
    """C that compiles only where all of this is so."""
    yield "#include <stddef.h>"
    yield f'#include "{HEADER}"'
    for name, structure in structures.items():
        yield f'_Static_assert(sizeof(struct {name}) == {ctypes.sizeof(structure)}, "size of {name}");'
        for field, kind in structure._fields_:
            place = getattr(structure, field)
            yield f'_Static_assert(offsetof(struct {name}, {field}) == {place.offset}, "{name}.{field}");'
            yield f'_Static_assert(sizeof(((struct {name} *)0)->{field}) == {place.size}, "size of {name}.{field}");'
            if kind in (abi.U8, abi.U16, abi.U32, abi.U64, abi.S32):
                signed = int(kind is abi.S32)
                of = f"__typeof__(((struct {name} *)0)->{field})"
                yield f'_Static_assert((({of})-1 < 0) == {signed}, "sign of {name}.{field}");'
    for name, value in numbers.items():
        yield f'_Static_assert({name} == {value}, "{name}");'


def complaints(structures, numbers):
    command = ["cc", "-std=gnu11", "-fsyntax-only", "-xc", "-"]
    source = "\n".join(claims(structures, numbers)) + "\n"
    return subprocess.run(command, input=source, capture_output=True, text=True, timeout=60).stderr


class Layout(unittest.TestCase):
    def test_all_is_as_the_compiler_has_it(self):
        self.assertEqual(complaints(structures(), numbers()), "")

    def test_a_difference_is_found(self):
        class ibgda_populate(abi.Structure):
            _fields_ = [("size", abi.U32), ("address", abi.U64), ("handle", abi.U32)]

        said = complaints({"ibgda_populate": ibgda_populate}, {"IBGDA_IOC_BIND": 0xBD07})
        for word in ("size of ibgda_populate", "ibgda_populate.handle", "IBGDA_IOC_BIND"):
            self.assertIn(word, said)

    def test_nothing_of_the_header_is_missing(self):
        self.assertEqual(set(re.findall(r"^struct (ibgda_\w+) \{", TEXT, re.M)), set(structures()))
        defined = set(re.findall(r"^#define (IBGDA_\w+)", TEXT, re.M))
        # The commands' numbers by themselves are part of the ioctls'.
        defined = {name for name in defined if not name.startswith("IBGDA_CMD_")}
        self.assertEqual(defined, set(numbers()))
        for name, structure in structures().items():
            body = re.search(rf"^struct {name} {{(.*?)^}};", TEXT, re.M | re.S).group(1)
            fields = re.findall(r"(\w+)(?:\[\d+\])?;", body)
            self.assertEqual(fields, [field for field, _ in structure._fields_], name)


if __name__ == "__main__":
    unittest.main()
