// SPDX-License-Identifier: MIT OR Apache-2.0
//! QEMU's command line: the machine, the PCI topology, the ports.

use std::ffi::OsString;
use std::path::Path;

use super::vm::Vm;
use super::{model, outside};
use crate::protocol::port;

/// RAM of the guest.
const MEMORY: &str = "2G";

/// A port of the guest and the socket that QEMU joins it to.
pub struct Port {
    /// The port's name.
    pub name: &'static str,
    /// The socket's file name in the run directory.
    pub socket: &'static str,
}

/// The ports that the host listens on.
pub const PORTS: [Port; 4] = [
    Port {
        name: port::CONTROL,
        socket: "control.sock",
    },
    Port {
        name: port::STDOUT,
        socket: "stdout.sock",
    },
    Port {
        name: port::STDERR,
        socket: "stderr.sock",
    },
    Port {
        name: port::KERNEL,
        socket: "kernel.sock",
    },
];

/// All arguments.
pub fn arguments(vm: &Vm<'_>) -> Vec<OsString> {
    let mut line = Line::default();
    machine(&mut line, vm);
    file_systems(&mut line, vm);
    ports(&mut line, vm);
    network(&mut line, vm);
    topology(&mut line, vm);
    line.0
}

#[derive(Default)]
struct Line(Vec<OsString>);

impl Line {
    fn add(&mut self, words: &[&str]) {
        self.0.extend(words.iter().map(OsString::from));
    }

    fn add_path(&mut self, option: &str, path: &Path) {
        self.0.push(option.into());
        self.0.push(path.into());
    }
}

fn machine(line: &mut Line, vm: &Vm<'_>) {
    let options = vm.options;
    line.add(&[
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
    ]);
    line.add(&[
        "-accel",
        "tcg,thread=multi",
        "-cpu",
        "max",
        "-smp",
        "2",
        "-m",
        MEMORY,
    ]);
    // The model maps the guest's memory, so it must be a file that can be shared.
    line.add(&[
        "-object",
        &format!("memory-backend-memfd,id=mem,size={MEMORY},share=on"),
    ]);
    line.add(&["-machine", "q35,memory-backend=mem"]);
    // Else a root port's link looks down after a reset, and every recovery from a PCIe error fails.
    line.add(&[
        "-global",
        "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off",
    ]);
    // On a loaded host the kernel's check of its timer fails now and then, and it panics. What the agent writes into the
    // log is not to be thinned out.
    let mut append =
        "console=ttyS0 quiet panic=-1 nokaslr no_timer_check printk.devkmsg=on ".to_owned();
    append += &options.append;
    if options.iommu {
        // Before the devices behind it. The caching mode is what tells the model of each mapping the guest makes.
        line.add(&["-device", "intel-iommu,intremap=on,caching-mode=on"]);
        append += " intel_iommu=on iommu.passthrough=0 iommu.strict=1";
    }
    line.add_path("-kernel", &options.kernel);
    line.add_path("-initrd", &options.initramfs);
    line.add(&["-append", &append]);
    line.add(&[
        "-chardev",
        &format!(
            "file,id=console,path={}",
            vm.log.join("console.log").display()
        ),
    ]);
    line.add(&["-serial", "chardev:console"]);
}

fn file_systems(line: &mut Line, vm: &Vm<'_>) {
    // Our own root is the guest's. What is mounted in it has inode numbers of its own, hence remap.
    line.add(&[
        "-fsdev",
        "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap",
    ]);
    line.add(&["-device", "virtio-9p-pci,fsdev=root,mount_tag=root"]);
    if let Some(share) = &vm.options.share {
        line.add(&[
            "-fsdev",
            &format!(
                "local,id=share,path={},security_model=none,multidevs=remap",
                share.display()
            ),
        ]);
        line.add(&["-device", "virtio-9p-pci,fsdev=share,mount_tag=share"]);
    }
}

fn ports(line: &mut Line, vm: &Vm<'_>) {
    // QEMU is at both ends of its monitor's socket: the other is a port of the guest.
    let monitor = vm.run_dir.join("monitor.sock");
    line.add(&[
        "-chardev",
        &format!(
            "socket,id=qmp,server=on,wait=off,path={}",
            monitor.display()
        ),
    ]);
    line.add(&["-object", "monitor-qmp,id=monitor,chardev=qmp"]);
    line.add(&["-device", "virtio-serial-pci,id=serial"]);
    if let Some(socket) = outside::socket(vm.options) {
        // QEMU listens: the agent may come when it likes.
        line.add(&[
            "-chardev",
            &format!("socket,id=gpu,server=on,wait=off,path={}", socket.display()),
        ]);
        line.add(&[
            "-device",
            &format!("virtserialport,bus=serial.0,chardev=gpu,name={}", port::GPU),
        ]);
    }
    let mut join = |id: &str, name: &str, socket: &Path| {
        line.add(&[
            "-chardev",
            &format!("socket,id={id},path={}", socket.display()),
        ]);
        line.add(&[
            "-device",
            &format!("virtserialport,bus=serial.0,chardev={id},name={name}"),
        ]);
    };
    for (index, port) in PORTS.iter().enumerate() {
        join(
            &format!("port{index}"),
            port.name,
            &vm.run_dir.join(port.socket),
        );
    }
    if vm.options.nics + vm.options.gpus > 0 {
        join("monitor", port::MONITOR, &monitor);
        join("model", port::MODEL, &model::control(vm.options));
    }
}

/// The Ethernet link between the two guests of `--peer`: each sends its frames to the other's socket.
fn network(line: &mut Line, vm: &Vm<'_>) {
    let Some(index) = vm.peer else { return };
    let socket = |index: usize| vm.options.run_dir.join(format!("link{index}.sock"));
    line.add(&[
        "-netdev",
        &format!(
            "dgram,id=link,local.type=unix,local.path={},remote.type=unix,remote.path={}",
            socket(index).display(),
            socket(1 - index).display()
        ),
    ]);
    line.add(&[
        "-device",
        // Locally administered addresses of QEMU's.
        &format!("virtio-net-pci,netdev=link,romfile=,mac=52:54:00:00:00:0{index}"),
    ]);
}

/// A root port, a switch below it, and a device at each of the switch's downstream ports: NICs, then GPUs. When the GPUs
/// are to be apart, each is at a root port of its own; when the NICs are one card, that is.
fn topology(line: &mut Line, vm: &Vm<'_>) {
    let options = vm.options;
    let mut chassis = 0;
    let mut slot = || {
        chassis += 1;
        format!("chassis={chassis},slot={chassis}")
    };
    let on_card = if options.card { options.nics } else { 0 };
    let apart = if options.split { options.gpus } else { 0 };
    let below_switch = on_card..options.nics + options.gpus - apart;
    if !below_switch.is_empty() {
        line.add(&[
            "-device",
            &format!("pcie-root-port,id=root0,bus=pcie.0,{}", slot()),
        ]);
        line.add(&["-device", "x3130-upstream,id=switch,bus=root0"]);
    }
    let nics = vm.nics().map(|n| format!("nic{n}"));
    let names = nics.chain(vm.gpus().map(|n| format!("gpu{n}")));
    // QEMU 11.1 aborts when the guest powers a vfio-user device's slot off (docs/qemu-bugs.md). A slot without a power
    // controller stays powered: the guest removes the device when the button is pressed, and QEMU keeps it.
    let mut slot = || format!("{},power_controller_present=off", slot());
    if on_card > 0 {
        line.add(&[
            "-device",
            &format!("pcie-root-port,id=card,bus=pcie.0,{}", slot()),
        ]);
    }
    for (index, name) in names.enumerate() {
        let port = match index < on_card {
            true => "card".to_owned(),
            false => format!("port-{name}"),
        };
        if index < on_card {
            // Its port is there.
        } else if below_switch.contains(&index) {
            line.add(&[
                "-device",
                &format!("xio3130-downstream,id={port},bus=switch,{}", slot()),
            ]);
        } else {
            line.add(&[
                "-device",
                &format!("pcie-root-port,id={port},bus=pcie.0,{}", slot()),
            ]);
        }
        let socket = model::dir(options).join(format!("{name}.sock"));
        // QEMU takes the socket only in this form.
        let mut device = serde_json::json!({
            "driver": "vfio-user-pci",
            "id": name,
            "bus": port,
            "rombar": 0,
            "socket": {"type": "unix", "path": socket},
        });
        if index < on_card {
            device["addr"] = format!("0.{index}").into();
            device["multifunction"] = (index == 0 && on_card > 1).into();
        }
        line.add(&["-device", &device.to_string()]);
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::Options;
    use super::*;

    fn devices(words: &[&str]) -> Vec<String> {
        values(words, 0, "-device")
    }

    /// What the option is given on the command line of one of the guests.
    fn values(words: &[&str], guest: usize, option: &str) -> Vec<String> {
        let fixed = [
            "run",
            "--kernel=k",
            "--initramfs=i",
            "--model=m",
            "--timeout=1",
            "--log=/l",
            "--run-dir=/r",
        ];
        let options = Options::parse_from(fixed.iter().chain(words).chain(&["--", "true"]));
        let all: Vec<_> = arguments(&Vm::all(&options)[guest])
            .iter()
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        all.windows(2)
            .filter(|pair| pair[0] == option)
            .map(|pair| pair[1].clone())
            .collect()
    }

    #[test]
    fn nics_and_gpus_sit_below_one_switch() {
        let devices = devices(&["--nics=2", "--gpus=1"]);
        assert_eq!(
            devices
                .iter()
                .filter(|device| device.starts_with("pcie-root-port"))
                .count(),
            1
        );
        assert_eq!(
            devices
                .iter()
                .filter(|device| device.starts_with("xio3130-downstream"))
                .count(),
            3
        );
        assert!(
            devices
                .iter()
                .any(|device| device.contains("/r/model/nic1.sock"))
        );
        assert!(
            devices
                .iter()
                .any(|device| device.contains("/r/model/gpu0.sock"))
        );
    }

    #[test]
    fn split_gpus_have_root_ports_of_their_own() {
        let devices = devices(&["--nics=1", "--gpus=2", "--split"]);
        assert_eq!(
            devices
                .iter()
                .filter(|device| device.starts_with("pcie-root-port"))
                .count(),
            3
        );
        assert_eq!(
            devices
                .iter()
                .filter(|device| device.starts_with("xio3130-downstream"))
                .count(),
            1
        );
    }

    #[test]
    fn two_guests_have_functions_of_their_own_and_a_link() {
        let words = ["--nics=2", "--gpus=1", "--peer=true"];
        let functions = |guest| -> Vec<String> {
            values(&words, guest, "-device")
                .iter()
                .filter_map(|device| serde_json::from_str::<serde_json::Value>(device).ok())
                .map(|device| device["id"].as_str().unwrap().to_owned())
                .collect()
        };
        assert_eq!(functions(0), ["nic0", "nic1", "gpu0"]);
        assert_eq!(functions(1), ["nic2", "nic3", "gpu1"]);
        let [a, b] = [0, 1].map(|guest| values(&words, guest, "-netdev"));
        assert!(
            a[0].contains("local.path=/r/link0.sock") && a[0].contains("remote.path=/r/link1.sock")
        );
        assert!(
            b[0].contains("local.path=/r/link1.sock") && b[0].contains("remote.path=/r/link0.sock")
        );
        assert!(values(&["--nics=1", "--gpus=0"], 0, "-netdev").is_empty());
    }

    #[test]
    fn a_card_has_the_nics_as_functions() {
        let devices = devices(&["--nics=2", "--gpus=1", "--card"]);
        let nics: Vec<serde_json::Value> = devices
            .iter()
            .filter_map(|device| serde_json::from_str(device).ok())
            .collect();
        for (nic, addr, multi) in [(0, "0.0", true), (1, "0.1", false)] {
            assert_eq!(nics[nic]["bus"], "card");
            assert_eq!(nics[nic]["addr"], addr);
            assert_eq!(nics[nic]["multifunction"], multi);
        }
        assert_eq!(nics[2]["bus"], "port-gpu0");
    }

    #[test]
    fn an_iommu_comes_before_the_devices_behind_it() {
        let with = devices(&["--nics=1", "--gpus=1", "--iommu"]);
        assert!(with[0].starts_with("intel-iommu,"), "{with:?}");
        let without = devices(&["--nics=1", "--gpus=1"]);
        assert!(without.iter().all(|device| !device.contains("iommu")));
    }

    #[test]
    fn a_machine_without_devices_has_no_switch_and_no_model() {
        let devices = devices(&["--nics=0", "--gpus=0"]);
        assert!(
            !devices
                .iter()
                .any(|device| device.contains("switch") || device.contains("org.ibgda.model"))
        );
    }
}
