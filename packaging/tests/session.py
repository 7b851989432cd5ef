# SPDX-License-Identifier: MIT OR Apache-2.0
"""Holds a session of a GPU and a NIC, until it is killed: session.py GPU NIC."""

import fcntl
import os
import struct
import sys
import time


def bdf(text):
    domain, bus, rest = text.split(":")
    device, function = rest.split(".")
    return struct.pack("=IBBBB", int(domain, 16), int(bus, 16), int(device, 16), int(function), 0)


BIND, SIZE = 0xBD01, 136
file = os.open("/dev/ibgda", os.O_RDWR | os.O_CLOEXEC)
argument = (struct.pack("=II", SIZE, 0) + bdf(sys.argv[1]) + bdf(sys.argv[2])).ljust(SIZE, b"\0")
fcntl.ioctl(file, BIND, bytearray(argument))
print("bound", flush=True)
time.sleep(600)
