#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Makes a small root file system that boots the VM by itself. Run inside the big one: bundle.py TARGET RELEASE WORD…

What is taken: QEMU with its firmware, the kernel with the modules that the guest loads, rdma-core's and perftest's tools,
and of the project's programs and tests those whose name is a WORD. Libraries follow their users; debug information is
left out.
"""

import pathlib
import shutil
import subprocess
import sys

# What runs on the host, and in the guest.
PROGRAMS = """qemu-system-x86_64 env timeout sh bash cat ls cp mkdir mount umount ln rm sleep dmesg grep sed tail head find
    sort tr cut stat readlink busybox ip modprobe insmod rmmod lspci ps kill pkill sysctl ibv_devinfo ibv_devices
    ibv_rc_pingpong ibv_uc_pingpong ibv_ud_pingpong ibv_srq_pingpong ibv_xsrq_pingpong ib_write_bw ib_write_lat ib_read_bw
    ib_read_lat ib_send_bw ib_send_lat ib_atomic_bw ib_atomic_lat""".split()
# Files that no program is linked with.
FILES = """usr/share/seabios/bios-256k.bin usr/share/qemu/bios-256k.bin usr/share/qemu/kvmvapic.bin
    usr/share/qemu/linuxboot_dma.bin usr/share/qemu/linuxboot.bin etc/hosts etc/passwd etc/group etc/nsswitch.conf etc/ld.so.conf
    etc/libibverbs.d/mlx5.driver usr/share/misc/pci.ids""".split()
# The guest's agent and root need these (ci/lib/initramfs.sh, ci/runner/src/guest); ib_ipoib is for the tests.
MODULES = """9pnet_virtio 9p overlay configfs aer_inject mlx5_ib ib_uverbs ib_umad rdma_ucm ib_ipoib virtio_net
    virtio_console""".split()
OPTIONAL_MODULES = {"ib_ipoib", "virtio_net"}
# A library's plugin is found by name at run time.
PLUGINS = ["usr/lib/x86_64-linux-gnu/libibverbs", "lib/x86_64-linux-gnu/libnss_files.so.2"]


class Root:
    """The root file system that is made."""

    def __init__(self, target):
        self.target = target
        self.have = set()

    def add(self, path):
        """Takes a file with all links on the way to it, and the libraries that it is linked with."""
        path = pathlib.Path("/", path)
        if path in self.have or not path.exists():
            return
        self.have.add(path)
        # A directory on the way may be a link (/lib is usr/lib).
        for parent in reversed(path.parents):
            if parent.is_symlink():
                self.link(parent)
                return self.add(parent.resolve() / path.relative_to(parent))
        place = self.target / path.relative_to("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            self.link(path)
            return self.add(path.parent / path.readlink())
        if path.is_dir():
            for inner in path.iterdir():
                self.add(inner)
            return
        shutil.copy2(path, place)
        with path.open("rb") as file:
            if file.read(4) != b"\x7fELF" or path.suffix == ".ko":
                return
        self.libraries(path)
        if path.is_relative_to("/opt"):
            subprocess.run(["strip", "-s", place], check=True)

    def link(self, path):
        place = self.target / path.relative_to("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.is_symlink():
            place.symlink_to(path.readlink())

    def libraries(self, path):
        said = subprocess.run(["ldd", path], capture_output=True, text=True, check=False)
        for word in said.stdout.split():
            if word.startswith("/"):
                self.add(word)

    def modules(self, release):
        for module in MODULES:
            command = ["modprobe", "-S", release, "--show-depends", module]
            shown = subprocess.run(command, capture_output=True, text=True, check=False)
            if shown.returncode != 0 and module not in OPTIONAL_MODULES:
                sys.exit(f"bundle: {shown.stderr.strip()}")
            for line in shown.stdout.splitlines():
                if line.startswith("insmod "):
                    self.add(line.split()[1])
        for file in ("modules.order", "modules.builtin", "modules.builtin.modinfo"):
            self.add(f"usr/lib/modules/{release}/{file}")
        subprocess.run(["depmod", "-b", self.target, release], check=True)


def main():
    target, release, *words = sys.argv[1:]
    root = Root(pathlib.Path(target))
    for name in PROGRAMS:
        found = shutil.which(name)
        if not found:
            sys.exit(f"bundle: no program {name}")
        root.add(found)
    for path in FILES + PLUGINS:
        root.add(path)
    root.modules(release)
    stage = pathlib.Path("/opt/ibgda")
    for path in ("bin/connectx", "bin/ibgda-vm-agent", "bin/ibgda-vm-run", "initramfs", "ibgda.ko"):
        root.add(stage / path)
    for path in stage.rglob("*"):
        if path.name in words or path.suffix == ".so":
            root.add(path)
    for name in ("dev", "proc", "sys", "tmp", "run", "root", "src", "mnt/share", "var/tmp"):
        (root.target / name).mkdir(parents=True, exist_ok=True)


main()
